"""The liveput planner: expectations against enumeration, and plans that can be checked by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.liveput import (
    Migration,
    MigrationCosts,
    Planner,
    counted_survivors,
    migration_between,
    sampled_survivors,
)
from deepspeed_bamboo.sim.steptimes import Grid, StepTable

COSTS = MigrationCosts(10.0, 20.0, 40.0, 15.0, rework_seconds=30.0, model_state_bytes=6e9, link_bytes_per_second=1e9)
TABLE = StepTable("t", {Grid(4, 3): 1.0, Grid(3, 3): 1.3, Grid(2, 3): 1.9, Grid(1, 3): 3.7})


def planner(*, costs: MigrationCosts = COSTS) -> Planner:
    return Planner(
        TABLE,
        samples_per_step=12,
        stages=range(3, 4),
        costs=costs,
        interval_seconds=60.0,
        survivors=lambda grid, machines, preempted: counted_survivors(grid, machines=machines, preempted=preempted),
    )


@given(grid=st.builds(Grid, st.integers(1, 3), st.integers(1, 3)), spare=st.integers(0, 3), preempted=st.integers(0, 4))
@settings(deadline=None)
def test_counting_is_enumerating(grid: Grid, spare: int, preempted: int) -> None:
    machines = grid.size + spare
    preempted = min(preempted, machines)
    found = [0] * (grid.pipelines + 1)
    choices = list(itertools.combinations(range(machines), preempted))
    for victims in choices:
        lost = [
            sum(victim < grid.size and victim % grid.stages == stage for victim in victims)
            for stage in range(grid.stages)
        ]
        found[grid.pipelines - max(lost)] += 1
    exact = counted_survivors(grid, machines=machines, preempted=preempted)
    assert exact == pytest.approx([count / len(choices) for count in found])
    assert sum(exact) == pytest.approx(1.0)


def test_sampling_comes_near_counting() -> None:
    arguments = {"machines": 60, "preempted": 9}
    exact = counted_survivors(Grid(4, 12), **arguments)
    sampled = sampled_survivors(Grid(4, 12), samples=4_000, generator=random.Random(1), **arguments)
    assert sampled == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize(
    ("before", "after", "least", "kind"),
    [
        (Grid(3, 4), Grid(3, 4), 3, Migration.NONE),
        (Grid(3, 4), Grid(2, 4), 3, Migration.INTRA_STAGE),
        (Grid(3, 4), Grid(2, 4), 2, Migration.INTRA_STAGE),
        (Grid(3, 4), Grid(3, 4), 2, Migration.INTER_STAGE),
        (Grid(3, 4), Grid(2, 6), 3, Migration.PIPELINE),
        (Grid(3, 4), Grid(3, 4), 0, Migration.RESTORE),
        (None, Grid(3, 4), 0, Migration.RESTORE),
    ],
)
def test_kinds_of_migration(before: Grid | None, after: Grid, least: int, kind: Migration) -> None:
    assert migration_between(before, after, least_replicas=least) is kind


def test_costs_include_the_state_that_moves() -> None:
    assert COSTS.seconds(Migration.INTER_STAGE, stages=3) == pytest.approx(20 + 2)
    assert COSTS.seconds(Migration.PIPELINE, stages=6) == pytest.approx(40 + 1)
    assert COSTS.seconds(Migration.NONE, stages=6) == 0


def test_it_stays_when_nothing_changes() -> None:
    assert planner().plan(Grid(3, 3), least_replicas=3, machines=11, forecast=[11] * 12) == Grid(3, 3)


def test_it_grows_when_that_pays_within_the_look_ahead() -> None:
    plan = planner()
    assert plan.plan(Grid(3, 3), least_replicas=3, machines=12, forecast=[12] * 12) == Grid(4, 3)
    # With one more minute in sight, 22 s of standing still are not made good.
    assert plan.plan(Grid(3, 3), least_replicas=3, machines=12, forecast=[]) == Grid(3, 3)


def test_it_does_not_grow_for_machines_that_will_be_gone() -> None:
    plan = planner().plan(Grid(3, 3), least_replicas=3, machines=12, forecast=[9] * 12)
    assert plan == Grid(3, 3)


def test_it_goes_on_smaller_after_a_loss() -> None:
    assert planner().plan(Grid(4, 3), least_replicas=3, machines=10, forecast=[10] * 6) == Grid(3, 3)
    assert planner().plan(Grid(4, 3), least_replicas=0, machines=2, forecast=[2]) is None


@given(forecast=st.lists(st.integers(0, 12), max_size=4), machines=st.integers(3, 12), least=st.integers(1, 2))
@settings(deadline=None, max_examples=60)
def test_the_plan_is_the_best_of_all_sequences(forecast: list[int], machines: int, least: int) -> None:
    """Dynamic programming, one decision for each run of equal counts, against trying every sequence of grids."""
    plan = planner()
    before = Grid(2, 3)
    forecast = [max(3, count) for count in forecast]

    def best(current: Grid, now: int, rest: list[int]) -> float:
        if not rest:
            return 0.0
        return max(
            plan.expected_samples(current, after, machines=now, preempted=max(0, now - rest[0]), intervals=1)
            + best(after, rest[0], rest[1:])
            for after in {*plan.candidates(rest[0]), *([current] if current.size <= rest[0] else [])}
        )

    def gain(first: Grid) -> float:
        kind = migration_between(before, first, least_replicas=least)
        training = 60.0 - COSTS.seconds(kind, stages=3)
        return training * 12 / plan.step_seconds(first) + best(first, machines, forecast)

    offered = {*plan.candidates(machines), *([before] if before.size <= machines else [])}
    chosen = plan.plan(before, least_replicas=least, machines=machines, forecast=forecast)
    assert chosen is not None
    assert gain(chosen) == pytest.approx(max(gain(first) for first in offered))
