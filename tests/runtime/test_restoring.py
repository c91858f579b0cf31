"""Losses that take the last live copy of a stage: the survivors go back to a memory checkpoint, and on, bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train, train_remembering
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, FP16, ZERO, kill

ONE_BY_FOUR = Training(
    "remembered-1x4", 4, steps=6, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, bamboo=CHECKED, faults=[]
)


def pair(step: int, at: str, micro_batch: int | None = None) -> list[dict[str, Any]]:
    """The worker of stage 1, and the one that has its shadow."""
    return [kill(step, 0, stage, at, micro_batch) for stage in (0, 1)]


def check(result: JobResult, whole: JobResult, training: Training, *, lost: int, world: int) -> None:
    assert result.codes.count(-9) == lost and result.codes.count(0) == world - lost, result.transcript()
    found = whole.common("losses")
    losses = [found[str(step)] for step in range(training.steps)] if isinstance(found, dict) else found
    for rank in result.survivors:
        got = result.values[rank]
        assert [got["losses"][str(step)] for step in range(training.steps)] == losses, result.transcript()
        assert all(loss == losses[step] for step, loss in got["redone"]), (got["redone"], losses)
        for what in ("steps", "norm", "scale", "skipped"):
            assert got[what] == whole.values[rank][what], what
        if training.evaluate_before:
            assert got["evaluations"] == whole.common("evaluations")
    assert result.common("digest") == whole.common("digest")


def test_owner_and_shadow_lost_at_once(jobs: Jobs) -> None:
    whole = jobs.run(train, world=4, training=ONE_BY_FOUR)
    killed = dataclasses.replace(ONE_BY_FOUR, faults=pair(4, "backward", 1))
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)
    assert result.survivors == [2, 3]
    [[from_step, until, _]] = result.values[2]["restored"]
    assert from_step < until == 4, result.values[2]["restored"]


KINDS = [
    ("idle", None),
    ("forward", 2),
    ("send_activation", 1),
    ("reduce", None),
    ("commit", None),
    ("step", None),
]
# While the loss of another worker is recovered from. Then one of four is left.
MEANWHILE = ["interrupted", "reported", "regroup", "resume", "protect", "protected"]
ALL_COPIES = {"checkpoint": {"memory_copies": 3}}


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "micro_batch"), KINDS)
def test_owner_and_shadow_lost_at_every_kind_of_instruction(jobs: Jobs, at: str, micro_batch: int | None) -> None:
    whole = jobs.run(train, world=4, training=ONE_BY_FOUR)
    killed = dataclasses.replace(ONE_BY_FOUR, faults=pair(4, at, micro_batch))
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)


@pytest.mark.sweep
@pytest.mark.parametrize("at", MEANWHILE)
def test_all_but_one_lost(jobs: Jobs, at: str) -> None:
    whole = jobs.run(train, world=4, training=ONE_BY_FOUR)
    step = 5 if at == "protected" else 4  # which is said at the next boundary
    faults = [kill(4, 0, 2, "forward", 1), kill(step, 0, 0, at), kill(step, 0, 1, at)]
    killed = dataclasses.replace(ONE_BY_FOUR, faults=faults, bamboo={**CHECKED, **ALL_COPIES})
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=3, world=4)


VARIANTS = [
    (Training("bf16-tied", 4, layers="tied", settings={**CLIPPED, **SCHEDULE, **BF16}), {}),
    (Training("fp16", 4, steps=7, settings={**CLIPPED, **FP16}, spikes=(1, 4)), {}),
    (Training("evaluated", 4, dropout=0.3, evaluate_before=(0, 2, 3, 4, 5)), {}),
    (Training("buffers", 4, layers="normalised"), {}),
    (Training("data-set", 4, training_data=True), {}),
    (Training("one-iterator", 4), {"shared_iterator": True}),
    (Training("writes", 4), {"writes": True}),
    (Training("eager", 4, bamboo={"redundancy": {"mode": "eager"}}), {}),
    (Training("zero", 4, settings={**CLIPPED, **ZERO, **BF16}), {}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("training", "options"), [pytest.param(*case, id=case[0].name) for case in VARIANTS])
def test_whatever_is_trained(jobs: Jobs, training: Training, options: dict[str, Any]) -> None:
    training = dataclasses.replace(training, steps=max(6, training.steps), faults=[])
    whole = jobs.run(train_remembering, world=4, training=training, **options)
    for at, micro_batch in (("forward", 1), ("step", None)):
        killed = dataclasses.replace(training, faults=pair(4, at, micro_batch))
        result = jobs.run(train_remembering, world=4, training=killed, **options)
        check(result, whole, training, lost=2, world=4)


@pytest.mark.sweep
def test_several_pipelines_keep_none_and_say_so(jobs: Jobs) -> None:
    memory = {"checkpoint": {"memory_interval_seconds": 1e-9}}
    result = jobs.run(train, world=2, training=Training("told-2x1", 1, steps=1, bamboo=memory, faults=[]))
    assert result.survivors == [0, 1] and "no memory checkpoints are kept" in result.transcript()


@pytest.mark.sweep
def test_losses_while_a_state_is_restored_and_on_the_way_back(jobs: Jobs) -> None:
    """Four of five, in an order in which each time the last copy of something goes."""
    training = dataclasses.replace(ONE_BY_FOUR, name="again-1x5", stages=5, count=5, steps=9)
    whole = jobs.run(train, world=5, training=training)
    faults = [*pair(4, "forward", 2), kill(3, 0, 3, "backward", 1), kill(7, 0, 4, "commit")]
    killed = dataclasses.replace(training, faults=faults, bamboo={"checkpoint": {"memory_copies": 4}})
    result = jobs.run(train_remembering, world=5, training=killed)
    check(result, whole, training, lost=4, world=5)


@pytest.mark.sweep
def test_without_a_copy_the_job_ends_as_it_did(jobs: Jobs) -> None:
    early = dataclasses.replace(ONE_BY_FOUR, name="early-1x4", faults=pair(0, "forward", 1))
    result = jobs.run(train_remembering, world=4, training=early)
    assert result.survivors == [] and "no live worker holds the state of 0.1" in result.transcript()
    assert "no memory checkpoint" in result.transcript()
