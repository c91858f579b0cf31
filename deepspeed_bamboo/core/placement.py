"""Which worker hosts what: coordinates -> workers and shadows -> workers, as one immutable value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.seating import seats

WorkerId = str


@dataclass(frozen=True)
class Placement:
    """Coordinates -> workers, plus shadows -> workers (architecture 2).

    ``owners`` names a worker for every coordinate of the grid. ``shadows`` names, for a coordinate,
    the worker that holds a valid replica of it; a coordinate without one is unprotected.
    All are tuples of pairs in grid order, so that equal placements compare and hash equal.
    ``alike`` says that all pipelines hold the same state of a stage (several pipelines, no ZeRO), so that a
    stage lost with its shadow can be copied from another pipeline (architecture 5).
    ``copies`` is how many shadows a coordinate should have, 1 or 2. ``second_shadows`` are the second ones: each is on
    a third worker, holds the same state, computes nothing, and becomes the shadow when the owner or the shadow is lost.
    """

    grid: Grid
    owners: tuple[tuple[Coordinate, WorkerId], ...]
    shadows: tuple[tuple[Coordinate, WorkerId], ...]
    alike: bool = False
    second_shadows: tuple[tuple[Coordinate, WorkerId], ...] = ()
    copies: int = 1

    @classmethod
    def of(
        cls,
        grid: Grid,
        *,
        owners: Mapping[Coordinate, WorkerId],
        shadows: Mapping[Coordinate, WorkerId],
        alike: bool = False,
        second_shadows: Mapping[Coordinate, WorkerId] | None = None,
        copies: int = 1,
    ) -> Placement:
        """Build from mappings. Raises ValueError when a coordinate has no owner, or two copies on one worker."""
        missing = [str(c) for c in grid if c not in owners]
        if missing:
            raise ValueError(f"coordinates without an owner: {', '.join(missing)}; every one needs a worker")
        doubled = [str(c) for c in grid if shadows.get(c) == owners[c]]
        if doubled:
            raise ValueError(f"shadows on their owner's worker: {', '.join(doubled)}; they would be lost together")
        seconds = second_shadows or {}
        odd = [str(c) for c in grid if c in seconds and seconds[c] in (owners[c], shadows.get(c, seconds[c]))]
        if odd or copies not in (1, 2) or (seconds and copies == 1):
            raise ValueError(
                f"second shadows of {', '.join(odd) or 'no coordinate'} on a worker that has the stage, or where there "
                f"is no first one, and {copies} copies; give 1 or 2, second shadows with 2 only, each on a third worker"
            )
        return cls(
            grid,
            tuple((c, owners[c]) for c in grid),
            tuple((c, shadows[c]) for c in grid if c in shadows),
            alike,
            tuple((c, seconds[c]) for c in grid if c in seconds),
            copies,
        )

    @classmethod
    def initial(
        cls,
        grid: Grid,
        workers: Iterable[WorkerId],
        *,
        protected: bool = True,
        alike: bool = False,
        copies: int = 1,
    ) -> Placement:
        """As :func:`seats` gives them to ``workers``, who are in rank order; every shadow where its predecessor is.

        Where one worker hosts both, the shadow is with another one (see :meth:`protected`). Workers without a
        seat stand by. ``copies``: shadows of each. Raises ValueError without workers.
        """
        ids = tuple(workers)
        owners = {c: worker for worker, seat in zip(ids, seats(grid, len(ids)), strict=True) for c in seat}
        bare = cls.of(grid, owners=owners, shadows={}, alike=alike and grid.pipelines > 1, copies=copies)
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

    def copies_of(self, coordinate: Coordinate) -> tuple[WorkerId, ...]:
        """Who holds the state of ``coordinate``: its owner, then in this order who stands in for it."""
        return tuple(w for held in (self.owners, self.shadows, self.second_shadows) for c, w in held if c == coordinate)

    def all_copies(self) -> dict[Coordinate, tuple[WorkerId, ...]]:
        """:meth:`copies_of` of every coordinate, in grid order."""
        holders: dict[Coordinate, tuple[WorkerId, ...]] = {c: (owner,) for c, owner in self.owners}
        for coordinate, worker in self.all_shadows:
            holders[coordinate] = (*holders[coordinate], worker)
        return holders

    @property
    def all_shadows(self) -> tuple[tuple[Coordinate, WorkerId], ...]:
        """First and second shadows: of each coordinate the first one, then the second; in grid order."""
        if not self.second_shadows:
            return self.shadows
        seconds = dict(self.second_shadows)
        pairs = (((c, w), (c, seconds[c])) if c in seconds else ((c, w),) for c, w in self.shadows)
        return tuple(pair for its in pairs for pair in its)

    def shadowed_by(self, worker: WorkerId) -> tuple[Coordinate, ...]:
        """The coordinates of which ``worker`` holds a first or second shadow, in grid order."""
        return tuple(c for c, w in self.all_shadows if w == worker)

    def next_in_line(self, worker: WorkerId) -> tuple[Coordinate, ...]:
        """The coordinates that ``worker`` takes over when their owner alone is lost, in grid order."""
        return tuple(c for c, w in self.shadows if w == worker)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers that own a coordinate, each once, by the rank of their first coordinate."""
        by_rank = sorted(self.owners, key=lambda pair: self.grid.rank(pair[0]))
        return tuple(dict.fromkeys(worker for _, worker in by_rank))

    @property
    def holders(self) -> frozenset[WorkerId]:
        """The workers that own or shadow a coordinate; others stand by."""
        return frozenset(worker for _, worker in (*self.owners, *self.shadows, *self.second_shadows))

    def without(self, lost: Iterable[WorkerId]) -> tuple[Placement | None, tuple[Coordinate, ...]]:
        """The placement after the workers in ``lost`` are gone, and the coordinates nobody alive holds.

        A lost coordinate goes to its shadow's worker, or if that is lost, too, to the second one's (architecture 5). A
        second shadow stands in for a first that is lost or has become the owner. What has no shadow left is unprotected
        until shadows are rebuilt. A coordinate that lost all of them goes, if pipelines
        are ``alike``, to a worker that has the same stage of another pipeline (see :meth:`copied_from`).
        When some coordinate has none of these, the loss is fatal: returns (None, those coordinates).
        """
        gone = frozenset(lost)
        owners = {c: w for c, w in self.owners if w not in gone}
        shadows = {c: w for c, w in self.shadows if w not in gone}
        seconds = {c: w for c, w in self.second_shadows if w not in gone}
        shadows |= {c: seconds.pop(c) for c in list(seconds) if c not in shadows}
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
                if coordinate in seconds:
                    shadows[coordinate] = seconds.pop(coordinate)
        return self.placed(owners=owners, shadows=shadows, second_shadows=seconds), ()

    def placed(
        self,
        *,
        owners: Mapping[Coordinate, WorkerId] | None = None,
        shadows: Mapping[Coordinate, WorkerId],
        second_shadows: Mapping[Coordinate, WorkerId],
    ) -> Placement:
        """The same grid and kind of job, with these ``owners`` (None: the same) and shadows. Raises as :meth:`of`."""
        return Placement.of(
            self.grid,
            owners=dict(self.owners) if owners is None else owners,
            shadows=shadows,
            alike=self.alike,
            second_shadows=second_shadows,
            copies=self.copies,
        )

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
        """The same owners, with ``copies`` shadows for every coordinate that has fewer, on others of ``workers``.

        Preferred is the worker of the predecessor (architecture 2), for the second one that of the predecessor's, else
        the one that holds least, the first in order among equals. Existing shadows stay. With a single worker nothing
        can be protected, with two there are no second shadows.
        ``confined``: a worker has the data of its own pipeline only, so first and last stages, which need them, get
        a shadow on a worker of their pipeline or none.
        """
        candidates = tuple(dict.fromkeys(workers))
        owners, shadows, seconds = dict(self.owners), dict(self.shadows), dict(self.second_shadows)
        held = dict.fromkeys(candidates, 0)
        for holder in (*owners.values(), *shadows.values(), *seconds.values()):
            if holder in held:
                held[holder] += 1
        fed: dict[int, set[WorkerId]] = {}
        for coordinate, owner in owners.items() if confined else ():
            fed.setdefault(coordinate.pipeline, set()).add(owner)
        for kind, missing in enumerate((shadows, seconds)[: self.copies]):
            for coordinate in self.grid:
                if coordinate in missing or (kind and coordinate not in shadows):
                    continue
                has = (owners[coordinate], *([shadows[coordinate]] if kind else []))
                others = [worker for worker in candidates if worker not in has]
                if confined and coordinate.stage in (0, self.grid.stages - 1):
                    others = [worker for worker in others if worker in fed[coordinate.pipeline]]
                if not others:
                    continue
                behind = self.grid.predecessor(coordinate)
                preferred = owners[self.grid.predecessor(behind) if kind else behind]
                chosen = preferred if preferred in others else min(others, key=lambda worker: held[worker])
                missing[coordinate] = chosen
                held[chosen] += 1
        return self.placed(shadows=shadows, second_shadows=seconds)

    def with_copies(self, copies: int) -> Placement:
        """The same for a job in which a coordinate has so many shadows; more than that are left out."""
        return replace(self, copies=copies, second_shadows=self.second_shadows if copies > 1 else ())

    def with_shadows(self, shadows: Iterable[tuple[Coordinate, WorkerId]]) -> Placement:
        """The same with these shadows, too, as first ones where there are none yet. Raises ValueError for one where a
        copy is already, and for a third one."""
        first, second = dict(self.shadows), dict(self.second_shadows)
        for coordinate, worker in shadows:
            kind = second if coordinate in first else first
            if coordinate in kind:
                raise ValueError(f"{worker} would have a third shadow of {coordinate}; there are 1 or 2")
            kind[coordinate] = worker
        return self.placed(shadows=first, second_shadows=second)

    def shadows_beyond(self, other: Placement) -> tuple[tuple[Coordinate, WorkerId], ...]:
        """The shadows, first and second, that ``other`` has not; in grid order."""
        covered = frozenset(other.all_shadows)
        return tuple(pair for pair in self.all_shadows if pair not in covered)

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {
            "pipelines": self.grid.pipelines,
            "stages": self.grid.stages,
            "owners": {str(c): w for c, w in self.owners},
            "shadows": {str(c): w for c, w in self.shadows},
            **({"alike": True} if self.alike else {}),
            **self._copies_to_json(),
        }

    def _copies_to_json(self) -> dict[str, Any]:
        if self.copies == 1:
            return {}
        return {"copies": self.copies, "second_shadows": {str(c): w for c, w in self.second_shadows}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Placement:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        return cls.of(
            Grid(value["pipelines"], value["stages"]),
            owners={Coordinate.parse(c): w for c, w in value["owners"].items()},
            shadows={Coordinate.parse(c): w for c, w in value["shadows"].items()},
            alike=bool(value.get("alike", False)),
            second_shadows={Coordinate.parse(c): w for c, w in value.get("second_shadows", {}).items()},
            copies=int(value.get("copies", 1)),
        )
