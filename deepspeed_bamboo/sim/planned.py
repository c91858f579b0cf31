"""What the engine would do with so many workers: placements and times by core's own functions, remembered by number.

Placements of the engine are made for the workers that there are (core/placing). Workers are alike here, so the blocks
and the time of an iteration depend on how many there are alone; who gets which block, and where shadows lie, depends on
who has what already, and on nodes and zones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..core.grid import Coordinate, Grid
from ..core.interrupted import Done, done_by, progress_after
from ..core.placement import Placement, WorkerId
from ..core.placing.balance import balance
from ..core.placing.matching import match
from ..core.placing.shadowing import with_all_shadows
from ..core.placing.sites import Sites, WorkerSite
from ..core.placing.solver import decide
from ..core.timing import Profile, iteration_seconds, timed_passes

__all__ = ["MOST_PASSES", "PlannedGrid", "Shape"]

MOST_PASSES = 20_000
"""Of an iteration, for it to be planned: more would take seconds for every number of workers."""
_SEARCHED = 20_000  # passes in the search for a placement: a third of the engine's own
_MOST_LOST = 3  # at once, that are told apart
_MOMENTS = 2  # of an iteration, at which a loss is played through


@dataclass(frozen=True)
class Shape:
    """A placement of so many workers that are all alike: numbers of workers in grid order, and an iteration's time."""

    owners: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class PlannedGrid:
    """A job's grid with its measured or assumed times.

    Attributes:
        grid: D x P.
        profile: seconds of passes of its stages.
        micro_batches: of each pipeline.
        protected: whether there are shadows.
        alike: whether every pipeline has the whole state of its stages (no ZeRO, not bf16).
        eager: whether shadows compute their forwards.
        copies: shadows of each coordinate, where there are any.
    """

    grid: Grid
    profile: Profile = field(hash=False)
    micro_batches: int
    protected: bool = True
    alike: bool = False
    eager: bool = False
    copies: int = 1

    def shape(self, workers: int) -> Shape:
        """The placement that the engine takes for so many workers, and how long an iteration takes with it."""
        return _shape(self.timed, min(workers, len(self.grid)))

    def arranged(self, workers: Sequence[WorkerSite], current: Placement | None) -> Placement:
        """The placement for these workers, with few moves from the current one."""
        sites = Sites.of(workers)
        if len(sites) >= len(self.grid):
            decision = decide(
                self.grid,
                workers,
                current=current,
                protected=self.protected and len(sites) > 1,
                alike=self.spread,
                copies=self.copies if current is None else current.copies,
            )
            return decision.placement
        number = {worker: index for index, worker in enumerate(sites.workers)}
        copies = {} if current is None else current.all_copies()
        held = {c: tuple(w for w in copies.get(c, ()) if w in number) for c in self.grid}
        blocks = self.shape(len(sites)).owners
        kept: list[dict[int, int]] = [{} for _ in sites.workers]
        for coordinate, block in zip(self.grid, blocks, strict=True):
            for worker in held[coordinate]:
                its = kept[block]
                its[number[worker]] = its.get(number[worker], 0) + 1
        chosen = match(kept, alike=dict.fromkeys(range(len(sites)), 1.0))
        owners = {c: sites.workers[chosen[block]] for c, block in zip(self.grid, blocks, strict=True)}
        return self.with_shadows(Placement.of(self.grid, owners=owners, shadows={}, alike=self.spread), sites, held)

    def with_shadows(
        self, placement: Placement, sites: Sites, held: Mapping[Coordinate, Sequence[WorkerId]]
    ) -> Placement:
        """The same owners, with a shadow for every coordinate, or two."""
        if not self.protected or len(sites) < 2:
            return placement
        bare = Placement.of(self.grid, owners=dict(placement.owners), shadows={}, alike=self.spread, copies=self.copies)
        return with_all_shadows(bare, sites, held=held)

    @property
    def spread(self) -> bool:
        """Whether what one pipeline has lost can be had from another."""
        return self.alike and self.grid.pipelines > 1

    def seconds_of(self, placement: Placement) -> float:
        """An iteration with any placement, by the plan's own order."""
        return _seconds(self.timed, _numbers(placement))

    @property
    def timed(self) -> _Timed:
        """What times depend on."""
        profile = self.profile
        return _Timed(self.grid, profile.forward, profile.backward, profile.handover, self.micro_batches)

    @property
    def work_seconds(self) -> float:
        """Of all passes of an iteration, one after the other."""
        stages = range(self.grid.stages)
        return sum(self.profile.work(stage) for stage in stages) * self.grid.pipelines * self.micro_batches

    def least_seconds_of(self, placement: Placement) -> float:
        """An iteration with any placement takes no less: the busiest worker's work."""
        busy: dict[WorkerId, float] = {}
        for coordinate, worker in placement.owners:
            busy[worker] = busy.get(worker, 0.0) + self.profile.work(coordinate.stage)
        return max(busy.values()) * self.micro_batches

    def loss_seconds(self, workers: int, *, lost: int, done: float) -> float:
        """From the moment at which all continue after a loss to the end of the interrupted iteration.

        Played through for some moments of an iteration and some victims, evenly spread over the workers, since every
        case would take too long.

        Args:
            workers: that took part.
            lost: how many of them host something and are gone.
            done: the share of the iteration that was over, 0 to 1.
        """
        taking_part = min(workers, len(self.grid))
        return _played_loss(
            self,
            taking_part,
            min(lost, _MOST_LOST, taking_part - 1),
            min(_MOMENTS - 1, int(done * _MOMENTS)),
        )


@lru_cache(maxsize=8192)
def _played_loss(planned: PlannedGrid, workers: int, lost: int, moment: int) -> float:
    shape = planned.shape(workers)
    names = [f"w{number}" for number in range(workers)]
    owners = {c: names[number] for c, number in zip(planned.grid, shape.owners, strict=True)}
    bare = Placement.of(planned.grid, owners=owners, shadows={}, alike=planned.spread)
    before = planned.with_shadows(bare, Sites.of(WorkerSite(name, name) for name in names), {})
    after = None
    # Of neighbours some would be fatal: fewer victims, until the rest can continue.
    for count in range(lost, 0, -1):
        after, _ = before.without([names[(2 * i + 1) * workers // (2 * count)] for i in range(count)])
        if after is not None:
            break
    if after is None:
        return shape.seconds
    number = {name: index for index, name in enumerate(names)}
    owners_after = tuple(number[worker] for _, worker in after.owners)
    return _left_seconds(planned.timed, workers, moment, owners_after, eager=planned.eager)


@dataclass(frozen=True)
class _Timed:
    """What the time of an iteration depends on, besides who hosts what. Can be remembered by."""

    grid: Grid
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    handover: float
    micro_batches: int

    @property
    def profile(self) -> Profile:
        return Profile(self.forward, self.backward, handover=self.handover)

    def placement(self, owners: Sequence[int]) -> Placement:
        """Workers by number, without shadows, which take no time."""
        named = {c: f"w{number}" for c, number in zip(self.grid, owners, strict=True)}
        return Placement.of(self.grid, owners=named, shadows={})


def _numbers(placement: Placement) -> tuple[int, ...]:
    """Owners in grid order, numbered as they come: workers are alike, so that is all that times depend on."""
    numbers: dict[WorkerId, int] = {}
    return tuple(numbers.setdefault(worker, len(numbers)) for _, worker in placement.owners)


@lru_cache(maxsize=4096)
def _seconds(timed: _Timed, owners: tuple[int, ...]) -> float:
    """Of an iteration in the plan's own order."""
    return iteration_seconds(timed.placement(owners), timed.profile, micro_batches=timed.micro_batches)


@lru_cache(maxsize=4096)
def _left_seconds(timed: _Timed, workers: int, moment: int, owners_after: tuple[int, ...], *, eager: bool) -> float:
    """Of an iteration in which a loss at a moment leaves these owners: what is left then."""
    before, after = timed.placement(_shape(timed, workers).owners), timed.placement(owners_after)
    progress = progress_after(_done(timed, workers, moment), before, after, eager=eager)
    left = timed_passes(after, timed.profile, micro_batches=timed.micro_batches, progress=progress)
    return max((end for _, end in left), default=0.0)


@lru_cache(maxsize=1024)
def _done(timed: _Timed, workers: int, moment: int) -> Done:
    """What is over at a moment of an undisturbed iteration."""
    shape = _shape(timed, workers)
    passes = timed_passes(timed.placement(shape.owners), timed.profile, micro_batches=timed.micro_batches)
    return done_by(passes, timed.grid, at_seconds=shape.seconds * (moment + 0.5) / _MOMENTS)


@lru_cache(maxsize=4096)
def _shape(timed: _Timed, workers: int) -> Shape:
    grid, micro_batches = timed.grid, timed.micro_batches
    if workers == len(grid):
        owners = tuple(range(workers))
        return Shape(owners, _seconds(timed, owners))
    sites = [WorkerSite(f"w{number}", f"w{number}") for number in range(workers)]
    found = balance(
        grid, sites, profile=timed.profile, micro_batches=micro_batches, protected=False, most_passes=_SEARCHED
    )
    numbers = {site.worker: number for number, site in enumerate(sites)}
    return Shape(tuple(numbers[worker] for _, worker in found.placement.owners), found.seconds)


def micro_batches_of(*, samples_per_step: int, pipelines: int, micro_batch_samples: int) -> int | None:
    """How many each pipeline has; None if the grid does not start, since the batch does not divide."""
    count = samples_per_step / (pipelines * micro_batch_samples)
    return round(count) if count >= 1.0 and math.isclose(count, round(count), abs_tol=1e-9) else None
