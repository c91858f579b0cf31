"""Where shadows go: with the predecessor (architecture 2), unless the owner's zone or node would take both.

Second ones (``redundancy.copies``: 2) go where no two losses take all copies of a stage.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId
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


def without_shadows(
    grid: Grid, owners: Mapping[Coordinate, WorkerId], *, current: Placement | None, alike: bool, copies: int
) -> Placement:
    """These ``owners``; ``alike`` also if ``current`` is, and as many ``copies`` as that has if it is given."""
    return Placement.of(
        grid,
        owners=owners,
        shadows={},
        alike=grid.pipelines > 1 and (alike or (current is not None and current.alike)),
        copies=copies if current is None else current.copies,
    )


def with_all_shadows(
    bare: Placement,
    sites: Sites,
    *,
    held: Mapping[Coordinate, Sequence[WorkerId]],
    room: Mapping[WorkerId, int] | None = None,
    bytes_of: Callable[[Coordinate], int] = lambda _: 0,
) -> Placement:
    """``bare``, which has owners only, with as many shadows of each coordinate as its ``copies`` says. Arguments as
    those of :func:`choose_shadows`."""
    owners = dict(bare.owners)
    shadows = choose_shadows(bare.grid, owners, sites, held=held, room=room, bytes_of=bytes_of)
    seconds: dict[Coordinate, WorkerId] = {}
    if bare.copies > 1:
        seconds = choose_second_shadows(bare.grid, owners, shadows, sites, held=held, room=room, bytes_of=bytes_of)
    return bare.placed(shadows=shadows, second_shadows=seconds)


def choose_second_shadows(
    grid: Grid,
    owners: Mapping[Coordinate, WorkerId],
    shadows: Mapping[Coordinate, WorkerId],
    sites: Sites,
    *,
    held: Mapping[Coordinate, Sequence[WorkerId]],
    room: Mapping[WorkerId, int] | None = None,
    bytes_of: Callable[[Coordinate], int] = lambda _: 0,
) -> dict[Coordinate, WorkerId]:
    """A third worker for the second shadow of every coordinate that has a first; none where there are two workers.

    It is as far from the nearer one of owner and shadow as can be (see :func:`choose_shadows`), then as far from the
    other. So with three zones no loss of two zones takes all three, with three nodes no loss of two nodes. Among equals
    it is with a worker that has the state already (``held``), then with the owner of the stage before the predecessor,
    then with the worker that holds fewest. ``room`` is what is left before any shadow is placed; whoever has none gets
    none.
    """
    choice = _SecondChoice(sites, (*owners.values(), *shadows.values()), room or {})
    for coordinate, worker in shadows.items():
        choice.fill(choice.number[worker], bytes_of(coordinate))
    chosen: dict[Coordinate, WorkerId] = {}
    for coordinate in grid:
        if coordinate not in shadows:
            continue
        behind = owners[grid.predecessor(grid.predecessor(coordinate))]
        best = choice.best(
            (choice.number[owners[coordinate]], choice.number[shadows[coordinate]]),
            liked=(held.get(coordinate, ()), (behind,)),
            size=bytes_of(coordinate),
        )
        if best is not None:
            chosen[coordinate] = sites.workers[best]
            choice.give(best, bytes_of(coordinate))
    return chosen


class _SecondChoice:
    """How much the workers have to do and to hold, by their numbers in ``sites``, as second shadows are given."""

    def __init__(self, sites: Sites, holding: Iterable[WorkerId], room: Mapping[WorkerId, int]) -> None:
        self.number = {worker: index for index, worker in enumerate(sites.workers)}
        self._sites = sites
        self._free = {self.number[worker]: left for worker, left in room.items() if worker in self.number}
        self._load = [0] * len(sites)
        for worker in holding:
            self._load[self.number[worker]] += 1
        self._lightest_first = sorted((load, worker) for worker, load in enumerate(self._load))

    def fill(self, worker: int, size: int) -> None:
        """``size`` bytes of its room are taken."""
        if worker in self._free:
            self._free[worker] -= size

    def give(self, worker: int, size: int) -> None:
        """It has one more shadow, of ``size`` bytes."""
        self.fill(worker, size)
        del self._lightest_first[bisect_left(self._lightest_first, (self._load[worker], worker))]
        self._load[worker] += 1
        insort(self._lightest_first, (self._load[worker], worker))

    def best(self, has: tuple[int, int], *, liked: Sequence[Sequence[WorkerId]], size: int) -> int | None:
        """For a stage of which ``has`` have the first two copies; ``liked`` are preferred, in that order."""

        def merit(worker: int) -> tuple[list[int], list[int], int]:
            those = [int(self._sites.workers[worker] in names) for names in liked]
            return self._far(worker, has), those, -self._load[worker]

        known = sorted({self.number[name] for names in liked for name in names if name in self.number})
        able = [worker for worker in known if worker not in has and self._free.get(worker, size) >= size]
        return max([*able, *self._lightest(has, size)], key=merit, default=None)

    def _lightest(self, has: tuple[int, int], size: int) -> list[int]:
        """Of the workers that are as far as can be from both, the one that holds fewest; nobody if nobody has room."""
        farthest, found = self._farthest(has), list[int]()
        for _, worker in self._lightest_first:
            if worker in has or self._free.get(worker, size) < size:
                continue
            if not found or self._far(worker, has) > self._far(found[0], has):
                found = [worker]
            if self._far(found[0], has) >= farthest:
                break
        return found

    def _far(self, worker: int, has: tuple[int, int]) -> list[int]:
        """How far from the nearer one, then from the other."""
        return sorted(_distance(self._sites, worker, other) for other in has)

    def _farthest(self, has: tuple[int, int]) -> list[int]:
        """No worker is farther; whether one is so far is not said."""
        if len(self._sites.zones) > len({self._sites.zone[worker] for worker in has}):
            return [3, 3]
        return [2, 3] if len(self._sites.zones) > 1 else [2, 2]


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
