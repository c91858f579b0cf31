"""After a loss that takes the last copy of a stage: what the survivors go back to, and where each finds its part. Pure.

A live worker keeps copies of stages in its host memory, each of the state after so many steps. The survivors' own live
state is one of a later step, and a state is good only as a whole: so all go back, to the newest step of which every
coordinate can be had from some survivor, and do the steps since then again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId


@dataclass(frozen=True)
class Kept:
    """What one worker has in its host memory: coordinates by step. ``redoes_from``: the first step that it can do
    again, with the same data and settings. ``stored``: the steps of the checkpoints in the store that are of this
    training, as far as it knows."""

    parts: Mapping[int, tuple[Coordinate, ...]] = field(default_factory=dict)
    redoes_from: int = 0
    stored: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        parts = {str(step): list(map(str, coordinates)) for step, coordinates in self.parts.items()}
        return {"parts": parts, "redoes_from": self.redoes_from, "stored": list(self.stored)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Kept:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        parts = {int(step): tuple(map(Coordinate.parse, found)) for step, found in value["parts"].items()}
        return cls(parts, int(value["redoes_from"]), tuple(map(int, value["stored"])))


@dataclass(frozen=True)
class State:
    """The state after ``step`` steps, and which workers have each coordinate of it, in their order."""

    step: int
    holders: Mapping[Coordinate, tuple[WorkerId, ...]]


@dataclass(frozen=True)
class Handover:
    """``source`` sends its copy of ``coordinate`` to ``destination``, which has none."""

    coordinate: Coordinate
    source: WorkerId
    destination: WorkerId


def newest_state(
    grid: Grid,
    kept: Mapping[WorkerId, Kept],
    *,
    until: int,
    without: Collection[tuple[WorkerId, int, Coordinate]] = (),
) -> State | None:
    """The newest state of at most ``until`` steps that is there as a whole and that all can go on from; None: none is.

    ``without``: copies that turned out to be damaged.
    """
    first = _first_redoable(kept)
    steps = {step for own in kept.values() for step in own.parts if first <= step <= until}
    for step in sorted(steps, reverse=True):
        holders = {
            c: tuple(w for w, own in kept.items() if c in own.parts.get(step, ()) and (w, step, c) not in without)
            for c in grid
        }
        if all(holders.values()):
            return State(step, holders)
    return None


def stored_steps(
    kept: Mapping[WorkerId, Kept], *, until: int, than: State | None, without: Collection[int] = ()
) -> tuple[int, ...]:
    """The steps of at most ``until`` of which the store may have a state that all can go on from, newer ``than`` that
    in memory; in order. ``without`` those that could not be read."""
    first = max(_first_redoable(kept), -1 if than is None else than.step + 1)
    steps = {step for own in kept.values() for step in own.stored if first <= step <= until}
    return tuple(sorted(steps.difference(without)))


def _first_redoable(kept: Mapping[WorkerId, Kept]) -> int:
    return max((own.redoes_from for own in kept.values()), default=0)


def handovers(
    state: State, placement: Placement, keepers: Mapping[Coordinate, Sequence[WorkerId]]
) -> tuple[Handover, ...]:
    """What has to be sent so that owners, holders of shadows and ``keepers`` have their copies; in an order that is the
    same everywhere. Nobody sends much more than the others."""
    sent: Counter[WorkerId] = Counter()
    result = []
    for coordinate in placement.grid:
        wanted = [*placement.copies_of(coordinate), *keepers.get(coordinate, ())]
        sources = state.holders[coordinate]
        for destination in dict.fromkeys(wanted):
            if destination not in sources:
                source = min(sources, key=lambda worker: sent[worker])
                sent[source] += 1
                result.append(Handover(coordinate, source, destination))
    return tuple(result)


def rescued(placement: Placement, members: Sequence[WorkerId]) -> Placement:
    """Where all coordinates go when only ``members`` are left and some coordinate is with none of them.

    What a survivor owns stays with it, what it shadows comes to it; the rest goes to whoever owns least, the first in
    order among equals. Every coordinate has a shadow if there are two members. Raises ValueError without members.
    """
    if not members:
        raise ValueError("nobody is left to own anything; a placement needs at least 1 worker")
    owners = {c: worker for c, worker in placement.owners if worker in members}
    left: dict[Coordinate, list[WorkerId]] = {}
    for coordinate, worker in placement.all_shadows:
        if worker in members:
            left.setdefault(coordinate, []).append(worker)
    load = Counter(dict.fromkeys(members, 0))
    load.update(owners.values())
    for coordinate in placement.grid:
        if coordinate not in owners:
            lightest = min(members, key=lambda worker: load[worker])
            owners[coordinate] = left[coordinate].pop(0) if left.get(coordinate) else lightest
            load[owners[coordinate]] += 1
    bare = placement.placed(owners=owners, shadows={}, second_shadows={})
    return bare.with_shadows((c, worker) for c, its in left.items() for worker in its).protected(members)


@dataclass(frozen=True)
class Site:
    """Where a worker is; "" for a zone that isn't known."""

    node: str
    zone: str = ""


def keepers(placement: Placement, sites: Mapping[WorkerId, Site], *, copies: int) -> dict[Coordinate, list[WorkerId]]:
    """Who keeps a copy of each coordinate besides its owner and its shadow's holder: ``copies`` workers, or all there
    are.

    They are in other zones and on other nodes than those who have it, as far as that goes, and each keeps about as much
    as the others.
    """
    load: Counter[WorkerId] = Counter()
    result: dict[Coordinate, list[WorkerId]] = {}
    for coordinate in placement.grid:
        has = list(placement.copies_of(coordinate))
        chosen: list[WorkerId] = []
        for _ in range(copies):
            others = [worker for worker in sites if worker not in has]
            if not others:
                break
            best = min(others, key=lambda worker: (*_near(worker, has, sites), load[worker]))
            load[best] += 1
            has.append(best)
            chosen.append(best)
        result[coordinate] = chosen
    return result


def _near(worker: WorkerId, others: Sequence[WorkerId], sites: Mapping[WorkerId, Site]) -> tuple[int, int]:
    """How many of ``others`` are in the worker's zone, and on its node."""
    own = sites[worker]
    known = [sites[other] for other in others if other in sites]
    return sum(bool(own.zone) and site.zone == own.zone for site in known), sum(site.node == own.node for site in known)
