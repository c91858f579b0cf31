"""Pauses and joins are read from a job's events; the benchmark's kills find every worker in its place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepspeed_bamboo.sweep.bench_jobs import STEPS_BETWEEN_KILLS, BenchSetup, kills
from deepspeed_bamboo.sweep.pauses import PARTS, joins, pauses, spread, straight_line, undisturbed_seconds


def event(kind: str, t: float, step: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "t": t, "step": step, "epoch": 1, **fields}


def failover(t: float, *, taken_over: list[str], regroup: float) -> dict[str, Any]:
    seconds = {"detect": 0.01, "abort": 0.25, "regroup": regroup, "recompute": 0.75, "total": 1.5}
    times = {"regrouped_t": 101.0, "first_recomputed_t": 101.25}
    return event("failover", t, 4, lost=["0.1"], pause_seconds=seconds, taken_over=taken_over, **times)


EVENTS = [
    *(event("step", 10.0 * step, step, seconds=0.5 + step) for step in (0, 1, 2, 3)),
    event("fault", 100.0, 4),
    failover(102.5, taken_over=["0.1"], regroup=0.5),
    failover(102.5, taken_over=[], regroup=0.625),
    event("protected", 103.0, 5, seconds=0.75, waited_seconds=0.125),
    event("step", 103.0, 4, seconds=9.0),
    event("reconfigured", 110.0, 6, joining=["w1.1"], seconds=0.25, transfer_seconds=0.125),
    event("reconfigured", 111.0, 6, joining=["w1.1"], seconds=0.5, transfer_seconds=0.0625),
    event("step", 112.0, 6, seconds=9.0),
    event("step", 113.0, 9, seconds=3.0),
]


def test_the_parts_of_a_pause_follow_one_another_from_the_kill_to_the_end_of_the_iteration() -> None:
    (pause,) = pauses(EVENTS)
    assert pause.parts == {
        "detect": 0.25,
        "abort": 0.25,
        "regroup": 0.5,
        "plan": 0.25,
        "recompute": 0.5,
        "finish": 0.75,
    }
    assert tuple(pause.parts) == PARTS
    assert sum(pause.parts.values()) == pause.to_iteration_end == 2.5
    assert (pause.to_recompute, pause.slowest_regroup, pause.protect) == (1.25, 0.625, 0.125)
    assert pause.undisturbed == undisturbed_seconds(EVENTS) == 3.0


def test_a_join_is_as_long_as_for_the_survivor_that_it_held_up_longest() -> None:
    (join,) = joins(EVENTS)
    assert (join.workers, join.pause, join.transfer, join.after_loss) == (("w1.1",), 0.5, 0.125, 11.0)


def test_the_line_goes_through_points_that_lie_on_one() -> None:
    assert straight_line([(4, 1.0), (8, 2.0), (12, 3.0)]) == pytest.approx((0.0, 0.25))
    with pytest.raises(ValueError, match="two or more"):
        straight_line([(4, 1.0), (4, 2.0)])
    assert spread([]) == {} and spread([2.0, 1.0, 4.0]) == {"median": 2.0, "least": 1.0, "greatest": 4.0}


def test_every_stage_is_killed_in_turn_with_steps_to_join_in_between() -> None:
    setup = BenchSetup(pipelines=2, stages=3)
    faults = kills(setup, rounds=2)
    faults.check(setup.grid, micro_batches=setup.micro_batches)
    assert [fault.stage for fault in faults.faults] == [0, 1, 2, 0, 1, 2]
    assert {fault.pipeline for fault in faults.faults} == {setup.pipelines - 1}
    steps = [fault.step for fault in faults.faults]
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {STEPS_BETWEEN_KILLS}
