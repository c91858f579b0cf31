"""Liveput: the throughput that a grid is expected to deliver under preemptions to come (Parcae, NSDI'24, section 6).

Pure functions, usable online: from the grid that runs, the machines that there are and a forecast of their number,
`plan` finds the grid to run now, by dynamic programming over the look-ahead. What a preemption costs depends on which
machines it hits, so costs are expectations over all equally likely victims, counted exactly where that is feasible
and sampled otherwise.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .steptimes import Grid, StepTimes

__all__ = [
    "Migration",
    "MigrationCosts",
    "Planner",
    "Survivors",
    "counted_survivors",
    "migration_between",
    "sampled_survivors",
]


class Migration(enum.Enum):
    """What it takes to get from one grid to another."""

    NONE = "none"
    """Nothing changes."""
    INTRA_STAGE = "intra-stage"
    """Every stage still has replicas enough: groups are rebuilt, no state moves."""
    INTER_STAGE = "inter-stage"
    """Some machines take up another stage, and receive its state from a replica."""
    PIPELINE = "pipeline"
    """The model is cut into another number of stages: most machines receive state."""
    RESTORE = "restore"
    """A stage has no replica left: all begin from the last checkpoint."""


@dataclass(frozen=True)
class MigrationCosts:
    """Seconds that training stands still.

    Attributes:
        intra_stage_seconds: see Migration.
        inter_stage_seconds: without the state that moves.
        pipeline_seconds: without the state that moves.
        restore_seconds: on top of pipeline_seconds.
        rework_seconds: training lost on average with a restore: half of the checkpoint interval.
        model_state_bytes: parameters and optimizer state of the whole model.
        link_bytes_per_second: what a machine receives at.
    """

    intra_stage_seconds: float
    inter_stage_seconds: float
    pipeline_seconds: float
    restore_seconds: float
    rework_seconds: float
    model_state_bytes: float
    link_bytes_per_second: float

    def seconds(self, kind: Migration, *, stages: int) -> float:
        """Standing still for a migration to a grid of so many stages, without rework.

        State arrives at every machine at the same time, from different replicas, so one stage's size counts.
        """
        moving = self.model_state_bytes / stages / self.link_bytes_per_second
        costs = {
            Migration.NONE: 0.0,
            Migration.INTRA_STAGE: self.intra_stage_seconds,
            Migration.INTER_STAGE: self.inter_stage_seconds + moving,
            Migration.PIPELINE: self.pipeline_seconds + moving,
            Migration.RESTORE: self.pipeline_seconds + self.restore_seconds,
        }
        return costs[kind]


def migration_between(before: Grid | None, after: Grid, *, least_replicas: int) -> Migration:
    """The kind of a migration.

    Args:
        before: the grid that ran; None if none did.
        after: the grid to run.
        least_replicas: live replicas of the stage of `before` that has fewest; its pipelines if none was lost.
    """
    if before is None or least_replicas == 0:
        return Migration.RESTORE
    if after.stages != before.stages:
        return Migration.PIPELINE
    if after.pipelines > least_replicas:
        return Migration.INTER_STAGE
    if after == before and least_replicas == before.pipelines:
        return Migration.NONE
    return Migration.INTRA_STAGE


# Of the grids that are worth considering, so many of the fastest are: slower ones are steps down that a forecast of a
# sharp drop could ask for, which the next interval can still choose.
_MOST_CANDIDATES = 8

# How likely it is that the stage with the fewest replicas has 0, 1, ..., D of them left.
Survivors = tuple[float, ...]


def counted_survivors(grid: Grid, *, machines: int, preempted: int) -> Survivors:
    """The distribution of the least replicas when `preempted` of `machines` go, all choices equally likely; exact.

    Counted with a generating function: the coefficient of z^k in (sum over i <= m of C(D, i) z^i)^P (1 + z)^spares is
    the number of choices of k victims that take no more than m from any stage.

    Args:
        grid: D x P machines work, the others stand by.
        machines: at least D x P.
        preempted: 0 to machines.
    """
    choices = math.comb(machines, preempted)
    spare = machines - grid.size
    spares = [math.comb(spare, lost) for lost in range(min(spare, preempted) + 1)]
    left: list[float] = [0.0] * (grid.pipelines + 1)
    fewer = 0
    for most_lost in range(min(grid.pipelines, preempted) + 1):
        stage = [math.comb(grid.pipelines, lost) for lost in range(most_lost + 1)]
        ways = _product(_power(stage, grid.stages, preempted), spares, preempted)
        at_most = ways[preempted] if len(ways) > preempted else 0
        # The stage that loses most loses exactly so many.
        left[grid.pipelines - most_lost] = (at_most - fewer) / choices
        fewer = at_most
    return tuple(left)


def _power(base: list[int], exponent: int, degree: int) -> list[int]:
    result = [1]
    while exponent:
        if exponent & 1:
            result = _product(result, base, degree)
        base = _product(base, base, degree)
        exponent >>= 1
    return result


def _product(left: list[int], right: list[int], degree: int) -> list[int]:
    """Of two polynomials, without the terms above a degree."""
    result = [0] * min(degree + 1, len(left) + len(right) - 1)
    for i, one in enumerate(left):
        for j, other in enumerate(right[: degree + 1 - i]):
            result[i + j] += one * other
    return result


def sampled_survivors(
    grid: Grid, *, machines: int, preempted: int, samples: int, generator: random.Random
) -> Survivors:
    """The same from random choices of the victims, for when counting would take too long."""
    found = [0] * (grid.pipelines + 1)
    for _ in range(samples):
        lost = [0] * grid.stages
        for victim in generator.sample(range(machines), preempted):
            if victim < grid.size:
                lost[victim % grid.stages] += 1
        found[grid.pipelines - max(lost)] += 1
    return tuple(count / samples for count in found)


@dataclass
class _Memory:
    """What a planner has found out so far: values that never change, so that plans stay a function of their input."""

    candidates: dict[int, tuple[Grid, ...]] = field(default_factory=dict)
    # Grids than which no other is as fast or faster on as few machines, for up to so many machines, by size.
    frontier: list[Grid] = field(default_factory=list)
    frontier_machines: int = 0
    step_seconds: dict[Grid, float] = field(default_factory=dict)
    standstill: dict[tuple[Grid, Grid, int, int], float] = field(default_factory=dict)
    # Least replicas that may be left, each with its probability, where that is not 0.
    survivors: dict[tuple[Grid, int, int], tuple[tuple[int, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planner:
    """Plans for one job; remembers expectations that come up again.

    Attributes:
        steps: step times; the smaller the better.
        samples_per_step: the global batch.
        stages: the numbers of stages to consider.
        costs: of migrations.
        interval_seconds: between two counts of the forecast.
        survivors: counted_survivors, or one that samples.
    """

    steps: StepTimes
    samples_per_step: int
    stages: range
    costs: MigrationCosts
    interval_seconds: float
    survivors: Callable[[Grid, int, int], Survivors]

    @cached_property
    def _memory(self) -> _Memory:
        return _Memory()

    def candidates(self, machines: int) -> tuple[Grid, ...]:
        """Grids worth considering: no other is as fast or faster on as few machines or fewer; the fastest of them."""
        known = self._memory.candidates
        if machines not in known:
            known[machines] = self._find_candidates(machines)
        return known[machines]

    def _find_candidates(self, machines: int) -> tuple[Grid, ...]:
        memory = self._memory
        fastest = self.step_seconds(memory.frontier[-1]) if memory.frontier else math.inf
        for size in range(memory.frontier_machines + 1, machines + 1):
            for grid in sorted((Grid(size // p, p) for p in self.stages if size % p == 0), key=self.step_seconds):
                if self.step_seconds(grid) < fastest:
                    fastest = self.step_seconds(grid)
                    memory.frontier.append(grid)
        memory.frontier_machines = max(memory.frontier_machines, machines)
        end = bisect.bisect_right(memory.frontier, machines, key=lambda grid: grid.size)
        return tuple(memory.frontier[max(0, end - _MOST_CANDIDATES) : end])

    def step_seconds(self, grid: Grid) -> float:
        """A step on a grid."""
        known = self._memory.step_seconds
        if grid not in known:
            known[grid] = self.steps.hosted_seconds(grid, most_hosted=1)
        return known[grid]

    def expected_samples(self, before: Grid, after: Grid, *, machines: int, preempted: int, intervals: int) -> float:
        """Samples expected of some intervals that begin with `preempted` of `machines` going and a migration."""
        known = self._memory.standstill
        key = (before, after, machines, preempted)
        if key not in known:
            known[key] = self._expected_standstill(before, after, machines, preempted)
        seconds = intervals * self.interval_seconds - known[key]
        return seconds * self.samples_per_step / self.step_seconds(after)

    def _expected_standstill(self, before: Grid, after: Grid, machines: int, preempted: int) -> float:
        known = self._memory.survivors
        key = (before, machines, preempted)
        if key not in known:
            found = self.survivors(before, machines, preempted)
            known[key] = tuple((replicas, likely) for replicas, likely in enumerate(found) if likely)
        lost = 0.0
        for replicas, likely in known[key]:
            kind = migration_between(before, after, least_replicas=replicas)
            rework = self.costs.rework_seconds if kind is Migration.RESTORE else 0.0
            lost += likely * (self.costs.seconds(kind, stages=after.stages) + rework)
        return lost

    def plan(self, before: Grid | None, *, least_replicas: int, machines: int, forecast: Sequence[int]) -> Grid | None:
        """The grid to run now.

        Args:
            before: what ran so far; None if nothing did.
            least_replicas: of its stages, now; see migration_between.
            machines: that there are now.
            forecast: machines in the coming intervals.

        Returns:
            The first grid of the sequence that is expected to deliver the most samples; None if no grid fits.
        """
        # While the number of machines stays, moving later is never better than moving at once: one decision a run.
        (_, staying), *runs = _runs((machines, *forecast))
        best = {}
        for grid in self._offered(before, machines):
            kind = migration_between(before, grid, least_replicas=least_replicas)
            # A restore must be paid whatever is chosen, so its rework makes no difference here.
            training = staying * self.interval_seconds - self.costs.seconds(kind, stages=grid.stages)
            best[grid] = (training * self.samples_per_step / self.step_seconds(grid), grid)
        if not best:
            return None
        now = machines
        for following, intervals in runs:
            best = self._one_run_on(best, now, following, intervals)
            now = following
        return max(best.values(), key=lambda one: (one[0], -one[1].size))[1]

    def _offered(self, before: Grid | None, machines: int) -> tuple[Grid, ...]:
        found = self.candidates(machines)
        if before is not None and before.size <= machines and before not in found:
            return (*found, before)
        return found

    def _one_run_on(
        self, best: dict[Grid, tuple[float, Grid]], machines: int, following: int, intervals: int
    ) -> dict[Grid, tuple[float, Grid]]:
        """From the best way to each grid (samples, and the grid that it begins with) to those of the next run."""
        preempted = max(0, machines - following)
        result: dict[Grid, tuple[float, Grid]] = {}
        for before, (gained, first) in best.items():
            for after in self._offered(before, following):
                more = self.expected_samples(before, after, machines=machines, preempted=preempted, intervals=intervals)
                if after not in result or gained + more > result[after][0]:
                    result[after] = (gained + more, first)
        # With no grid that fits, waiting is all there is.
        return result or best


def _runs(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Equal neighbours counted: (3, 3, 5) is [(3, 2), (5, 1)]."""
    return [(count, len(list(group))) for count, group in itertools.groupby(counts)]
