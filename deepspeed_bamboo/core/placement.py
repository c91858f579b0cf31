"""Which worker hosts what: coordinates -> workers and shadows -> workers, as one immutable value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.seating import seats

WorkerId = str


@dataclass(frozen=True)
class Placement:
    """Coordinates -> workers, plus shadows -> workers (architecture 2).

    ``owners`` names a worker for every coordinate of the grid. ``shadows`` names, for a coordinate,
    the worker that holds a valid replica of it; a coordinate without one is unprotected.
    Both are tuples of pairs in grid order, so that equal placements compare and hash equal.
    ``alike`` says that all pipelines hold the same state of a stage (several pipelines, no ZeRO), so that a
    stage lost with its shadow can be copied from another pipeline (architecture 5).
    """

    grid: Grid
    owners: tuple[tuple[Coordinate, WorkerId], ...]
    shadows: tuple[tuple[Coordinate, WorkerId], ...]
    alike: bool = False

    @classmethod
    def of(
        cls,
        grid: Grid,
        *,
        owners: Mapping[Coordinate, WorkerId],
        shadows: Mapping[Coordinate, WorkerId],
        alike: bool = False,
    ) -> Placement:
        """Build from mappings. Raises ValueError when a coordinate has no owner or is its own shadow."""
        missing = [str(c) for c in grid if c not in owners]
        if missing:
            raise ValueError(f"coordinates without an owner: {', '.join(missing)}; every one needs a worker")
        doubled = [str(c) for c in grid if shadows.get(c) == owners[c]]
        if doubled:
            raise ValueError(f"shadows on their owner's worker: {', '.join(doubled)}; they would be lost together")
        return cls(
            grid,
            tuple((c, owners[c]) for c in grid),
            tuple((c, shadows[c]) for c in grid if c in shadows),
            alike,
        )

    @classmethod
    def initial(
        cls, grid: Grid, workers: Iterable[WorkerId], *, protected: bool = True, alike: bool = False
    ) -> Placement:
        """As :func:`seats` gives them to ``workers``, who are in rank order; every shadow where its predecessor is.

        Where one worker hosts both, the shadow is with another one (see :meth:`protected`). Workers without a
        seat stand by. Raises ValueError without workers.
        """
        ids = tuple(workers)
        owners = {c: worker for worker, seat in zip(ids, seats(grid, len(ids)), strict=True) for c in seat}
        bare = cls.of(grid, owners=owners, shadows={}, alike=alike and grid.pipelines > 1)
        return bare.protected(owners.values()) if protected else bare

    def owner(self, coordinate: Coordinate) -> WorkerId:
        """The worker that hosts ``coordinate``."""
        return dict(self.owners)[coordinate]

    def shadow(self, coordinate: Coordinate) -> WorkerId | None:
        """The worker that holds the shadow of ``coordinate``, or None when it is unprotected."""
        return dict(self.shadows).get(coordinate)

    def hosted_by(self, worker: WorkerId) -> tuple[Coordinate, ...]:
        """The coordinates that ``worker`` owns, in grid order."""
        return tuple(c for c, w in self.owners if w == worker)

    def shadowed_by(self, worker: WorkerId) -> tuple[Coordinate, ...]:
        """The coordinates whose shadow ``worker`` holds, in grid order."""
        return tuple(c for c, w in self.shadows if w == worker)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers that own a coordinate, each once, by the rank of their first coordinate."""
        by_rank = sorted(self.owners, key=lambda pair: self.grid.rank(pair[0]))
        return tuple(dict.fromkeys(worker for _, worker in by_rank))

    @property
    def holders(self) -> frozenset[WorkerId]:
        """The workers that own or shadow a coordinate; others stand by."""
        return frozenset(worker for _, worker in (*self.owners, *self.shadows))

    def without(self, lost: Iterable[WorkerId]) -> tuple[Placement | None, tuple[Coordinate, ...]]:
        """The placement after the workers in ``lost`` are gone, and the coordinates nobody alive holds.

        A lost coordinate goes to its shadow's worker (architecture 5); it and everything shadowed by a
        lost worker is unprotected until shadows are rebuilt. One that lost its shadow too goes, if pipelines
        are ``alike``, to a worker that has the same stage of another pipeline (see :meth:`copied_from`).
        When some coordinate has none of these, the loss is fatal: returns (None, those coordinates).
        """
        gone = frozenset(lost)
        shadows = {c: w for c, w in self.shadows if w not in gone}
        owners = {c: w for c, w in self.owners if w not in gone}
        copied = {
            coordinate: holder
            for coordinate in self.grid
            if coordinate not in owners and coordinate not in shadows
            if (holder := self._same_stage(coordinate, owners, shadows)) is not None
        }
        fatal = tuple(c for c in self.grid if c not in owners and c not in shadows and c not in copied)
        if fatal:
            return None, fatal
        for coordinate in self.grid:
            if coordinate not in owners:
                owners[coordinate] = copied[coordinate] if coordinate in copied else shadows.pop(coordinate)
        return Placement.of(self.grid, owners=owners, shadows=shadows, alike=self.alike), ()

    def _same_stage(
        self, coordinate: Coordinate, owners: Mapping[Coordinate, WorkerId], shadows: Mapping[Coordinate, WorkerId]
    ) -> WorkerId | None:
        """Who will own the same stage of the next pipeline that is not lost altogether, in cyclic order."""
        if not self.alike:
            return None
        for distance in range(1, self.grid.pipelines):
            other = Coordinate((coordinate.pipeline + distance) % self.grid.pipelines, coordinate.stage)
            holder = owners.get(other, shadows.get(other))
            if holder is not None:
                return holder
        return None

    def copied_from(self, coordinate: Coordinate, *, held: Iterable[Coordinate]) -> Coordinate | None:
        """Of the coordinates ``held`` by the owner of a lost ``coordinate``, the one whose state it copies."""
        same = {c for c in held if c.stage == coordinate.stage and c != coordinate}
        cycle = [(coordinate.pipeline + distance) % self.grid.pipelines for distance in range(1, self.grid.pipelines)]
        return next((Coordinate(d, coordinate.stage) for d in cycle if Coordinate(d, coordinate.stage) in same), None)

    def protected(self, workers: Iterable[WorkerId], *, confined: bool = False) -> Placement:
        """The same owners, with a shadow for every coordinate that has none, on another of ``workers``.

        Preferred is the worker of the predecessor (architecture 2), else the one that holds least, the first in
        order among equals. Existing shadows stay. With a single worker nothing can be protected.
        ``confined``: a worker has the data of its own pipeline only, so first and last stages, which need them, get
        a shadow on a worker of their pipeline or none.
        """
        candidates = tuple(dict.fromkeys(workers))
        owners, shadows = dict(self.owners), dict(self.shadows)
        held = dict.fromkeys(candidates, 0)
        for holder in (*owners.values(), *shadows.values()):
            if holder in held:
                held[holder] += 1
        for coordinate in self.grid:
            if coordinate in shadows:
                continue
            others = [worker for worker in candidates if worker != owners[coordinate]]
            if confined and coordinate.stage in (0, self.grid.stages - 1):
                fed = {worker for c, worker in owners.items() if c.pipeline == coordinate.pipeline}
                others = [worker for worker in others if worker in fed]
            if not others:
                continue
            preferred = owners[self.grid.predecessor(coordinate)]
            chosen = preferred if preferred in others else min(others, key=lambda worker: held[worker])
            shadows[coordinate] = chosen
            held[chosen] += 1
        return Placement.of(self.grid, owners=owners, shadows=shadows, alike=self.alike)

    def with_shadows(self, shadows: Mapping[Coordinate, WorkerId]) -> Placement:
        """The same with these shadows, too. Raises ValueError for one on its owner's worker."""
        return Placement.of(
            self.grid, owners=dict(self.owners), shadows={**dict(self.shadows), **shadows}, alike=self.alike
        )

    def shadows_beyond(self, other: Placement) -> dict[Coordinate, WorkerId]:
        """The shadows of coordinates that have none in ``other``."""
        covered = dict(other.shadows)
        return {c: worker for c, worker in self.shadows if c not in covered}

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {
            "pipelines": self.grid.pipelines,
            "stages": self.grid.stages,
            "owners": {str(c): w for c, w in self.owners},
            "shadows": {str(c): w for c, w in self.shadows},
            **({"alike": True} if self.alike else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Placement:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        return cls.of(
            Grid(value["pipelines"], value["stages"]),
            owners={Coordinate.parse(c): w for c, w in value["owners"].items()},
            shadows={Coordinate.parse(c): w for c, w in value["shadows"].items()},
            alike=bool(value.get("alike", False)),
        )
