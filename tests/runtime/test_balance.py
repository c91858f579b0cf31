"""Stages move by measured times: after a loss, and away from a worker that has become slow."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.timing import Profile, iteration_seconds
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_asleep
from tests.runtime.test_losses import BF16
from tests.runtime.test_restoring import FP16_SET


def test_after_a_loss_the_stages_are_shared_anew(jobs: Jobs) -> None:
    """8 stages of known duration on 4 workers, of which one is lost: no other gets more than 3, the bits are the same.

    Passes only seem to take time, so that the load of this machine moves no stage.
    """
    fault = {"step": 6, "pipeline": 0, "stage": 3, "at": "backward", "micro_batch": 1, "signal": "KILL"}
    training = Training("asleep", 8, layers="sleeping", count=8, steps=12, faults=[fault])
    result = jobs.run(train_asleep, world=4, training=training, seeming=True)
    assert len(result.survivors) == 3
    profile = Profile((0.01,) * 8, (0.02,) * 8)
    best = balance(Grid(1, 8), [WorkerSite(f"w{i}", "n") for i in range(3)], profile=profile, micro_batches=4).seconds
    placement = Placement.from_json(result.common("placement"))
    assert sorted(len(placement.hosted_by(worker)) for worker in placement.workers) == [2, 3, 3]
    assert iteration_seconds(placement, profile, micro_batches=4) <= 1.2 * best
    whole = jobs.run(train_asleep, world=4, training=Training("whole", 8, layers="plain", count=8, steps=12, faults=[]))
    assert result.common("digest") == whole.common("digest")


SLOWLY = {"gradient_clipping": 0.05, "optimizer": {"type": "SGD", "params": {"lr": 0.3}}}
MOVED = [
    (stage, sets, {**SLOWLY, **precision})
    for sets, precision in (("clip", BF16), ("rate", BF16), ("rate", {}), ("scale", FP16_SET), ("own", {}))
    for stage in (0, 2, 7)
]


@pytest.mark.parametrize(
    ("stage", "sets", "settings"),
    [MOVED[0], *(pytest.param(*case, marks=pytest.mark.sweep) for case in MOVED[1:])],
)
def test_what_the_script_sets_before_the_step_in_which_its_own_stage_moves(
    jobs: Jobs, stage: int, sets: str, settings: dict[str, Any]
) -> None:
    fault = {"step": 6, "pipeline": 0, "stage": stage, "at": "backward", "micro_batch": 1, "signal": "KILL"}
    training = Training("asleep", 8, layers="sleeping", count=8, steps=12, settings=settings, faults=[fault])
    result = jobs.run(train_asleep, world=4, training=training, seeming=True, sets=sets)
    assert len(result.survivors) == 3
    placement = Placement.from_json(result.common("placement"))
    assert any(2 * int(worker[1:]) not in stages for worker, stages in stages_of(placement).items()), "nobody's moved"
    plain = Training("whole", 8, layers="plain", count=8, steps=12, settings=settings, faults=[])
    assert result.common("digest") == jobs.run(train_asleep, world=4, training=plain, sets=sets).common("digest")


def stages_of(placement: Placement) -> dict[str, list[int]]:
    return {worker: [place.stage for place in placement.hosted_by(worker)] for worker in placement.workers}


def test_a_worker_that_becomes_slow_is_found_and_gets_less(jobs: Jobs) -> None:
    """Found within 5 iterations, by name, and much of what it costs is won back; the bits are the same."""
    training = Training("slowed", 8, layers="sleeping", count=8, steps=22, faults=[])
    result = jobs.run(train_asleep, world=4, training=training, slow_rank=2, slow_from=10, times=3.0)
    check_found(result, won_back=0.5)
    whole = jobs.run(train_asleep, world=4, training=Training("whole", 8, layers="plain", count=8, steps=22, faults=[]))
    assert result.common("digest") == whole.common("digest")


def check_found(result: JobResult, *, won_back: float) -> None:
    """Of 22 steps, of which one worker of four is slow from step 10 on."""
    found = [slow for value in result.values.values() for slow in value["slow"]]
    assert [slow[1:] for slow in found] == [["w2", "passes"]], result.transcript()
    assert 10 <= found[0][0] <= 14
    placement = Placement.from_json(result.common("placement"))
    assert len(placement.hosted_by("w2")) < len(placement.grid) / 4, result.transcript()
    seconds = [min(value["seconds"][step] for value in result.values.values()) for step in range(22)]
    # The least of what is compared, since whatever else the cores do only adds to it.
    before, slowed, after = min(seconds[5:10]), median(seconds[11 : found[0][0] + 1]), min(seconds[18:])
    assert slowed - after >= won_back * (slowed - before), seconds


@pytest.mark.sweep
def test_a_worker_at_half_speed_is_found_and_most_of_what_it_costs_is_won_back(jobs: Jobs) -> None:
    """Its process is stopped half of the time. Of 16 stages it keeps few enough for 60 % to be won back."""
    training = Training("halved", 16, layers="dozing", count=16, steps=22, micro_batches=8, faults=[])
    result = jobs.run(train_asleep, world=4, training=training, slow_rank=2, slow_from=10, stopped_seconds=0.004)
    check_found(result, won_back=0.6)
    plain = Training("whole", 16, layers="plain", count=16, steps=22, micro_batches=8, faults=[])
    assert result.common("digest") == jobs.run(train_asleep, world=4, training=plain).common("digest")


@pytest.mark.sweep
def test_nobody_is_found_slow_on_two_loaded_cores(jobs: Jobs) -> None:
    training = Training("calm", 4, layers="dozing", count=4, steps=500, faults=[])
    result = jobs.run(train_asleep, world=4, training=training, timeout_seconds=300.0)
    assert [value["slow"] for value in result.values.values()] == [[], [], [], []], result.transcript()


def test_who_waits_for_data_or_in_the_script_is_named_for_that_and_keeps_its_work(jobs: Jobs) -> None:
    training = Training("busy", 4, layers="sleeping", count=4, steps=14, faults=[])
    result = jobs.run(train_asleep, world=4, training=training, slow_from=6, busy={"script": 1, "data": 3})
    found = [slow for value in result.values.values() for slow in value["slow"]]
    assert sorted(slow[1:] for slow in found) == [["w1", "script"], ["w3", "data"]], result.transcript()
    assert all(6 <= slow[0] <= 11 for slow in found), found
    placement = Placement.from_json(result.common("placement"))
    assert [len(placement.hosted_by(worker)) for worker in ("w0", "w1", "w2", "w3")] == [1, 1, 1, 1]
