"""Balance: blocks of stages on fewer workers than coordinates, such that an iteration takes the least time.

What is minimised, each before all after it:

1. what the loss of a node, then of a zone, would make fatal. Shadows see to that whatever the owners are: with two
   nodes no node, with two zones no zone takes an owner and its shadow (``shadowing``);
2. the time of an iteration by the plan's own order, with measured durations of stages and speeds of workers, bubbles
   included (``pacing``). Placements within ``TOLERANCE`` of the least time count as equal;
3. the bytes that move to new owners.

A placement that a worker's device can't hold (``holding.Memory``) is taken only where none was found that all can, and
then ``Balanced.fits`` is False.

Where there are few placements all are tried, so the result is the best there is. Else it is the best of these:
consecutive blocks over the whole grid; teams of workers that share pipelines, of which each has a block, in turn or
rotated, or single stages dealt out; what the current placement leaves; and what moving and exchanging single stages
makes of the best of them, first timed by blocks, then in the plan's own order.
``Balanced.least_seconds`` is a lower bound for any placement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.cutting import cut, dealt, rotated, shared
from deepspeed_bamboo.core.placing.holding import Memory
from deepspeed_bamboo.core.placing.matching import match
from deepspeed_bamboo.core.placing.pacing import Pacing
from deepspeed_bamboo.core.placing.shadowing import with_all_shadows, without_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.timing import Profile, iteration_seconds, least_seconds

TOLERANCE = 0.01
_FEW_PLACEMENTS = 800
MOST_PASSES = 60_000
"""Of blocks in all simulated iterations together: half a second or so."""
_LEAST_SHAPES = 3
# Single stages are moved where there are no more of them times workers.
_MOVABLE = 4_000
# The plan's own order decides among so many of the fastest found, where that doesn't take long, and then moves and
# exchanges single stages. Blocks are a good guess of it: what they say takes longer by more than _GUESSED is left out.
_EXACT = 24
_LEAST_EXACT = 6
_EXACT_PASSES = 20_000
_EXACT_SHARE = 0.75
_GUESSED = 0.05
_FULL = 1e6

Owners = tuple[int, ...]


@dataclass(frozen=True)
class Balanced:
    """A placement, the seconds of an iteration with it, a lower bound of those, and the bytes that owners get."""

    placement: Placement
    sites: Sites
    seconds: float
    least_seconds: float
    bytes_moved: int
    fits: bool = True

    @property
    def reason(self) -> str:
        """Why this placement, in words."""
        more = 100.0 * (self.seconds / self.least_seconds - 1.0)
        return (
            f"an iteration takes {more:.0f} % more than its work shared evenly without bubbles: of the placements "
            f"looked at the fastest, and of equal ones that which moves least ({self.bytes_moved} coordinates)"
        )


def balance(
    grid: Grid,
    workers: Iterable[WorkerSite],
    *,
    profile: Profile,
    micro_batches: int,
    current: Placement | None = None,
    bytes_of: Callable[[Coordinate], int] | None = None,
    protected: bool = True,
    alike: bool = False,
    memory: Memory | None = None,
    most_passes: int = MOST_PASSES,
    copies: int = 1,
) -> Balanced:
    """Place ``grid`` on live ``workers`` by time; see the module. Arguments as those of ``solver.decide``.

    ``memory`` is what stages take on devices, and how much room there is. ``most_passes`` bounds the search. Returns
    the same for the same values, wherever it runs. Raises ValueError as ``decide`` does for workers, and for
    a profile of another number of stages.
    """
    sites = Sites.of(workers)
    search = _Search(grid, sites, profile, micro_batches, current, bytes_of, memory, most_passes)
    owners = search.best()
    fits = not search.excess(owners)
    named = {c: sites.workers[number] for c, number in zip(grid, owners, strict=True)}
    held = {c: tuple(sites.workers[w] for w in held) for c, held in zip(grid, search.held, strict=True)}
    placement = without_shadows(grid, named, current=current, alike=alike, copies=copies)
    if protected and len(sites) > 1:
        placement = with_all_shadows(
            placement,
            sites,
            held=held,
            room=search.left(owners),
            bytes_of=lambda c: 0 if memory is None else memory.state[c.stage],
        )
    return Balanced(
        placement,
        sites,
        seconds=search.final_seconds(owners),
        least_seconds=search.least_seconds,
        bytes_moved=search.bytes_moved(owners),
        fits=fits,
    )


class _Search:
    """The placements of one call that were looked at, and what they cost."""

    def __init__(
        self,
        grid: Grid,
        sites: Sites,
        profile: Profile,
        micro_batches: int,
        current: Placement | None,
        bytes_of: Callable[[Coordinate], int] | None,
        memory: Memory | None,
        most_passes: int,
    ) -> None:
        if current is not None and current.grid != grid:
            raise ValueError(
                f"the current placement is of {current.grid} and not of {grid}; a job's grid never changes"
            )
        self._grid, self._sites, self._profile, self._micro_batches = grid, sites, profile, micro_batches
        number = {worker: index for index, worker in enumerate(sites.workers)}
        has = {} if current is None else current.all_copies()
        self.held = [tuple(number[w] for w in has.get(c, ()) if w in number) for c in grid]
        self._sizes = [1 if bytes_of is None else bytes_of(c) for c in grid]
        self._work = [profile.work(c.stage) for c in grid]
        self._speeds = [profile.speed(worker) for worker in sites.workers]
        self._seconds: dict[Owners, float] = {}
        self._memory = memory if memory is not None and memory.room else None
        self._exact_left = int(_EXACT_SHARE * most_passes)
        self._left = max(most_passes, _LEAST_SHAPES * 2 * len(sites) * micro_batches)
        self._pacing = Pacing(
            forward=profile.forward,
            backward=profile.backward,
            speeds=self._speeds,
            handover=profile.handover,
            micro_batches=micro_batches,
        )

    @property
    def least_seconds(self) -> float:
        """A lower bound for any placement."""
        pipelines, workers = self._grid.pipelines, self._sites.workers
        return least_seconds(self._profile, pipelines=pipelines, workers=workers, micro_batches=self._micro_batches)

    # -- what a placement costs --------------------------------------------------------------------

    def seconds(self, owners: Owners) -> float:
        """Of an iteration; simulated once for each placement."""
        if owners not in self._seconds:
            self._left -= self._pacing.passes(owners)
            self._seconds[owners] = self._pacing.seconds(owners) * self._penalty(owners)
        return self._seconds[owners]

    def _held(self, owners: Owners) -> dict[WorkerId, int]:
        """Bytes that workers own; empty where there is room for all."""
        if self._memory is None:
            return {}
        named = [self._sites.workers[worker] for worker in owners]
        return self._memory.owned(self._grid, named, micro_batches=self._micro_batches)

    def excess(self, owners: Owners) -> int:
        """Bytes for which there is no room."""
        return 0 if self._memory is None else self._memory.excess(self._held(owners))

    def left(self, owners: Owners) -> dict[WorkerId, int]:
        """The room for shadows beside what workers own, where it is limited."""
        held = self._held(owners)
        return {} if self._memory is None else {w: its - held.get(w, 0) for w, its in self._memory.room.items()}

    def _penalty(self, owners: Owners) -> float:
        """So much longer an iteration counts for what there is no room for: far beyond what any placement saves."""
        excess = self.excess(owners)
        return 1.0 if not excess else _FULL * (1.0 + excess / max(1, sum(self._sizes), *self._held(owners).values()))

    def _busy(self, owners: Owners) -> list[float]:
        """Seconds of each worker for one micro-batch of each of its stages."""
        busy = [0.0] * len(self._sites)
        for work, worker in zip(self._work, owners, strict=True):
            busy[worker] += work / self._speeds[worker]
        return busy

    def bytes_moved(self, owners: Owners) -> int:
        """Bytes that go to an owner that has none of them."""
        return sum(size for size, w, held in zip(self._sizes, owners, self.held, strict=True) if w not in held)

    def _bound(self, owners: Owners) -> float:
        """Less than an iteration can't take."""
        return max(self._busy(owners)) * self._micro_batches

    # -- the search --------------------------------------------------------------------------------

    def best(self) -> Owners:
        """The least time, and of those that are as good the fewest bytes."""
        count = len(self._sites)
        if count ** len(self._grid) <= _FEW_PLACEMENTS:
            every = itertools.product(range(count), repeat=len(self._grid))
            return self._cheapest({owners: self.exact_seconds(owners) for owners in every})
        shapes = list(dict.fromkeys(self._matched(owners) for owners in self._shapes()))
        shapes.sort(key=self._bound)
        start = self._chosen([*self._repaired(), *shapes])
        if len(self._grid) * count <= _MOVABLE:
            self._improve(start)
        return self._finally()

    def _finally(self) -> Owners:
        """Of what was simulated by blocks the best by the plan's own order, and what single moves make of it."""
        affordable = self._exact_left // (2 * len(self._grid) * self._micro_batches)
        if affordable < _LEAST_EXACT:
            return self._cheapest(self._seconds)
        fastest = sorted(self._seconds, key=lambda owners: (self._seconds[owners], self.bytes_moved(owners), owners))
        current = [owners for owners in self._repaired() if owners in self._seconds]
        candidates = dict.fromkeys((*current, *fastest[: min(_EXACT, affordable)]))
        exact = {owners: self.exact_seconds(owners) for owners in candidates}
        self._polish(exact, most=affordable - len(exact))
        return self._cheapest(exact)

    def _polish(self, exact: dict[Owners, float], *, most: int) -> None:
        """Add to ``exact`` what single stages, moved or exchanged, make of the fastest, as long as that saves time."""
        owners, better = min(exact, key=lambda owners: (exact[owners], owners)), True
        while better:
            better = False
            for other in self._neighbours(owners):
                limit = exact[owners]
                if other in exact or self._bound(other) > limit or self.seconds(other) > limit * (1.0 + _GUESSED):
                    continue
                if most <= 0:
                    return
                most -= 1
                exact[other] = self.exact_seconds(other)
                if exact[other] < limit * (1.0 - 1e-9):
                    owners, better = other, True
                    break

    def _cheapest(self, seconds: Mapping[Owners, float]) -> Owners:
        """Of those that are as fast as the fastest the one that moves the fewest bytes."""
        least = min(seconds.values())
        good = [owners for owners in seconds if seconds[owners] <= least * (1.0 + TOLERANCE)]
        return min(good, key=lambda owners: (self.bytes_moved(owners), seconds[owners], owners))

    def final_seconds(self, owners: Owners) -> float:
        """By the plan's own order, or by blocks where that would take seconds."""
        passes = 2 * len(self._grid) * self._micro_batches
        return self.exact_seconds(owners) if passes <= _EXACT_PASSES else self.seconds(owners)

    def exact_seconds(self, owners: Owners) -> float:
        """Of an iteration in the plan's own order."""
        named = {c: self._sites.workers[w] for c, w in zip(self._grid, owners, strict=True)}
        placement = Placement.of(self._grid, owners=named, shadows={})
        seconds = iteration_seconds(placement, self._profile, micro_batches=self._micro_batches)
        return seconds * self._penalty(owners)

    def _chosen(self, candidates: Iterable[Owners]) -> Owners:
        found: list[tuple[float, Owners]] = []
        least = float("inf")
        for owners in candidates:
            if found and self._left <= 0:
                break
            if self._bound(owners) > least * (1.0 + TOLERANCE):
                continue
            seconds = self.seconds(owners)
            least = min(least, seconds)
            found.append((seconds, owners))
        return self._cheapest({owners: seconds for seconds, owners in found})

    def _improve(self, owners: Owners) -> None:
        """Single stages moved or exchanged as long as that saves time or, for no time, bytes."""
        better = True
        while better and self._left > 0:
            better = False
            for other in self._neighbours(owners):
                if self._left <= 0:
                    break
                if self._bound(other) > self.seconds(owners):
                    continue
                gain = self.seconds(owners) - self.seconds(other)
                fewer = self.bytes_moved(other) < self.bytes_moved(owners)
                if gain > 1e-9 * self.seconds(owners) or (fewer and gain >= 0.0):
                    owners, better = other, True
                    break

    def _neighbours(self, owners: Owners) -> Iterator[Owners]:
        """First what moves stages away from the worker that is busiest."""
        busy = self._busy(owners)
        for i in sorted(range(len(owners)), key=lambda i: -busy[owners[i]]):
            for worker in sorted(range(len(self._sites)), key=busy.__getitem__):
                if worker != owners[i]:
                    yield (*owners[:i], worker, *owners[i + 1 :])
        for i, j in itertools.combinations(range(len(owners)), 2):
            if owners[i] != owners[j]:
                exchanged = list(owners)
                exchanged[i], exchanged[j] = owners[j], owners[i]
                yield tuple(exchanged)

    # -- where it begins ---------------------------------------------------------------------------

    def _repaired(self) -> Iterator[Owners]:
        """What is there now, where everybody that owns something is, or somebody has its shadow."""
        if all(self.held):
            yield tuple(held[0] for held in self.held)

    def _shapes(self) -> Iterator[Owners]:
        """Consecutive blocks: over the whole grid, and by teams."""
        by_place, by_speed = self._orders()
        if self._memory is not None and len(self._memory.room) >= len(self._sites):
            rooms = [float(max(1, self._memory.room[self._sites.workers[worker]])) for worker in by_place]
            needs = [float(self._memory.state[c.stage] + self._memory.activations[c.stage]) for c in self._grid]
            if sum(needs) > 0.0:
                yield tuple(by_place[position] for position in cut(needs, rooms))
        for order in dict.fromkeys((by_place, by_speed)):
            speeds = [self._speeds[worker] for worker in order]
            for way in (cut, shared):
                yield tuple(order[position] for position in way(self._work, speeds))
            yield tuple(order[position] for position in cut(self._work, speeds, late=True))
            for teams in self._team_counts():
                yield self._by_teams(order, teams, rotated)
                yield self._by_teams(order, teams, dealt)

    def _team_counts(self) -> Iterator[int]:
        most = min(self._grid.pipelines, len(self._sites))
        every = range(1, most + 1)
        yield from every if most <= 8 else sorted({1, 2, most // 2, most})

    def _by_teams(self, order: Sequence[int], teams: int, way: Callable[..., list[list[int]]]) -> Owners:
        """Teams of workers, each with its share of the pipelines, of which all its workers host stages."""
        count, pipelines = len(order), self._grid.pipelines
        stages = self._work[: self._grid.stages]
        owners: list[int] = []
        for team in range(teams):
            members = order[team * count // teams : (team + 1) * count // teams]
            its_pipelines = (team + 1) * pipelines // teams - team * pipelines // teams
            speeds = [self._speeds[worker] for worker in members]
            for row in way(stages, speeds, pipelines=its_pipelines):
                owners += [members[position] for position in row]
        return tuple(owners)

    def _orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Workers by what they hold, those that hold nothing last; and the fastest first."""
        first = [len(self.held)] * len(self._sites)
        for i, held in reversed(list(enumerate(self.held))):
            for worker in held[:1]:
                first[worker] = i
        numbers = range(len(self._sites))
        return (
            tuple(sorted(numbers, key=first.__getitem__)),
            tuple(sorted(numbers, key=lambda worker: (-self._speeds[worker], first[worker]))),
        )

    def _matched(self, owners: Owners) -> Owners:
        """The same blocks on workers of the same speed, such that few bytes move."""
        blocks: Mapping[int, list[int]] = {w: [] for w in range(len(self._sites))}
        for i, worker in enumerate(owners):
            blocks[worker].append(i)
        kept: list[dict[int, int]] = []
        for worker in blocks:
            its: dict[int, int] = {}
            for i in blocks[worker]:
                for holder in self.held[i]:
                    if self._speeds[holder] == self._speeds[worker]:
                        its[holder] = its.get(holder, 0) + self._sizes[i]
            kept.append(its)
        speeds = {worker: self._speeds[worker] for worker in blocks}
        chosen = match(kept, alike=speeds)
        return tuple(chosen[worker] for worker in owners)
