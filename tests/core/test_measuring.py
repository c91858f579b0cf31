"""What is measured of stages and workers, and who is found slow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.measuring import Measured
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.timing import Profile, iteration_seconds, with_handover

WORKERS = ("w0", "w1", "w2", "w3")


def run(iterations: int, seconds: Callable[[int, str], float], *, known: Measured | None = None) -> list[Measured]:
    """Each worker has the stage of its number, forwards of ``seconds(iteration, worker)``, backwards of twice that."""
    seen, measured = [], known or Measured()
    for iteration in range(iterations):
        samples = {
            worker: {stage: (seconds(iteration, worker), 2.0 * seconds(iteration, worker))}
            for stage, worker in enumerate(WORKERS)
        }
        measured = measured.after(samples, members=WORKERS)
        seen.append(measured)
    return seen


def test_durations_are_known_after_a_few_iterations() -> None:
    seen = run(4, lambda _, worker: 0.01 * (1 + WORKERS.index(worker)))
    assert seen[1].profile(4) is None
    profile = seen[-1].profile(4)
    assert profile is not None and not profile.speeds
    assert [round(value, 6) for value in profile.forward] == [0.01, 0.02, 0.03, 0.04]
    assert [round(value, 6) for value in profile.backward] == [0.02, 0.04, 0.06, 0.08]


def test_a_worker_at_half_speed_is_found_within_five_iterations_and_taken_back() -> None:
    seen = run(40, lambda i, worker: 0.02 if worker == "w2" and 10 <= i < 25 else 0.01)
    found = [i for i, measured in enumerate(seen) if measured.speeds]
    assert 10 < found[0] <= 14 and 25 < found[-1] <= 29
    assert found == list(range(found[0], found[-1] + 1))
    assert {w: round(speed, 2) for w, speed in seen[found[0]].speeds.items()} == {"w2": 0.5}


def test_a_job_that_is_slow_as_a_whole_has_no_slow_worker() -> None:
    assert not any(measured.speeds for measured in run(40, lambda i, _: 0.03 if i > 10 else 0.01))


def test_no_worker_is_found_by_noise_in_five_hundred_iterations() -> None:
    """Eight passes an iteration, of which each takes up to three times as long now and then, as on loaded cores."""
    draw = random.Random(3)

    def mean(*_: object) -> float:
        return 0.01 * fmean(draw.choice([1.0, 1.0, 1.2, 1.5, 3.0]) for _ in range(8))

    assert not any(measured.speeds for measured in run(500, mean))


def test_one_that_is_gone_is_forgotten() -> None:
    slow = run(12, lambda i, worker: 0.05 if worker == "w2" and i > 5 else 0.01)[-1]
    assert slow.speeds
    assert not slow.after({"w0": {0: (0.01, 0.02)}}, members=("w0", "w1")).speeds


def test_another_stage_of_a_slow_worker_does_not_become_what_is_known() -> None:
    """It moves to a slow worker: what the stage takes there says nothing about the stage."""
    slow = run(12, lambda i, worker: 0.03 if worker == "w2" and i > 5 else 0.01)[-1]
    after = slow.after({"w2": {1: (0.03, 0.06)}, "w0": {0: (0.01, 0.02)}}, members=WORKERS)
    assert after.stages[1] == slow.stages[1]


def test_the_handover_is_what_explains_the_time_of_an_iteration() -> None:
    grid = Grid(1, 4)
    placement = Placement.initial(grid, ["w0", "w1", "w2", "w3"])
    bare = Profile((1.0,) * 4, (2.0,) * 4)
    slower = iteration_seconds(placement, replace(bare, handover=0.5), micro_batches=6)
    found = with_handover(bare, placement, micro_batches=6, seconds=slower)
    assert found.handover == pytest.approx(0.5, abs=0.02)
    assert with_handover(bare, placement, micro_batches=6, seconds=0.1) == bare
