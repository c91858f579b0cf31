"""Where shadows go: with the predecessor (architecture 2), unless the owner's zone or node would take both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.placing.sites import Sites


def choose_shadows(
    grid: Grid,
    owners: Mapping[Coordinate, WorkerId],
    sites: Sites,
    *,
    held: Mapping[Coordinate, Sequence[WorkerId]],
    room: Mapping[WorkerId, int] | None = None,
    bytes_of: Callable[[Coordinate], int] = lambda _: 0,
) -> dict[Coordinate, WorkerId]:
    """A worker for the shadow of every coordinate; none when there is one worker only.

    The shadow is in another zone than its owner if any worker is, else on another node if any is, else on another
    worker. As far as that allows it is with the predecessor's owner, else with a worker that has the state already
    (``held``), else with the one that holds fewest shadows of that owner, so that a lost block is taken over by several
    workers at once, and of those the one that holds least; standbys count too. So where there are two zones, no loss of
    a single zone takes an owner and its shadow, however unevenly the workers are spread.

    ``room`` is how many bytes of shadows a worker can still hold; one that is not in it has enough. Whoever has none
    gets none, even if then a shadow is nearer to its owner, or there is none: a device that is too full ends the job.
    """
    choice = _Choice(owners, sites, room or {}, bytes_of)
    required = _best_distance(sites)
    if not required:
        return {}
    open_ones = []
    for coordinate in grid:
        preferred = choice.number[owners[grid.predecessor(coordinate)]]
        if not choice.give(coordinate, [preferred], required):
            open_ones.append(coordinate)
    for coordinate in open_ones:
        present = [choice.number[worker] for worker in held.get(coordinate, ()) if worker in choice.number]
        if not choice.give(coordinate, present, required):
            any(choice.give(coordinate, range(len(sites)), distance) for distance in range(required, 0, -1))
    return {c: sites.workers[choice.shadows[c]] for c in grid if c in choice.shadows}


class _Choice:
    """Shadows given so far, by the numbers of the workers in ``sites``, and what they leave."""

    def __init__(
        self,
        owners: Mapping[Coordinate, WorkerId],
        sites: Sites,
        room: Mapping[WorkerId, int],
        bytes_of: Callable[[Coordinate], int],
    ) -> None:
        self.number = {worker: index for index, worker in enumerate(sites.workers)}
        self.shadows: dict[Coordinate, int] = {}
        self._sites, self._bytes_of = sites, bytes_of
        self._owner = {coordinate: self.number[worker] for coordinate, worker in owners.items()}
        self._free = {self.number[worker]: left for worker, left in room.items() if worker in self.number}
        self._together: dict[tuple[int, int], int] = {}  # shadows of an owner that another worker has
        self._holding = [0] * len(sites)
        for worker in self._owner.values():
            self._holding[worker] += 1

    def give(self, coordinate: Coordinate, candidates: Sequence[int], distance: int) -> bool:
        """To the one of ``candidates`` with least to do that is so far from the owner and has room. False: to none."""
        owner, size = self._owner[coordinate], self._bytes_of(coordinate)
        able = (
            worker
            for worker in candidates
            if _distance(self._sites, owner, worker) >= distance and self._free.get(worker, size) >= size
        )
        chosen = min(
            able, key=lambda worker: (self._together.get((owner, worker), 0), self._holding[worker]), default=None
        )
        if chosen is None:
            return False
        self.shadows[coordinate] = chosen
        self._holding[chosen] += 1
        self._together[owner, chosen] = self._together.get((owner, chosen), 0) + 1
        if chosen in self._free:
            self._free[chosen] -= size
        return True


def _distance(sites: Sites, one: int, other: int) -> int:
    """3 in different zones, 2 on different nodes, 1 on different workers, 0 for the same."""
    if sites.zone[one] != sites.zone[other]:
        return 3
    return 2 if sites.node[one] != sites.node[other] else int(one != other)


def _best_distance(sites: Sites) -> int:
    if len(sites.zones) > 1:
        return 3
    return 2 if len(sites.nodes) > 1 else int(len(sites) > 1)
