"""Workers come, go and stand by: the same numbers as when nobody does (DESIGN 6)."""

from __future__ import annotations

from typing import Any

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_with_joiners


def kill(step: int, pipeline: int, stage: int, at: str, micro_batch: int | None = None) -> dict[str, Any]:
    where = {"step": step, "pipeline": pipeline, "stage": stage, "at": at}
    return where if micro_batch is None else {**where, "micro_batch": micro_batch}


def undisturbed(jobs: Jobs, training: Training, *, world: int) -> JobResult:
    plain = Training(**{**vars(training), "name": f"{training.name}-plain", "faults": []})
    return jobs.run(train_with_joiners, world=world, training=plain, waits={})


def check_equal(result: JobResult, expected: JobResult) -> None:
    losses = expected.common("losses")
    for rank in result.survivors:
        own = result.values[rank]["losses"]
        assert own == {step: losses[step] for step in own}, f"rank {rank}"
    assert result.common("digest") == expected.common("digest")


def test_two_join_after_two_were_lost(jobs: Jobs) -> None:
    training = Training("rejoin-1x4", 4, steps=8, faults=[kill(1, 0, 1, "backward", 1), kill(2, 0, 3, "forward", 2)])
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, joining=2, training=training, waits={"4": 2})
    assert result.survivors == [0, 2, 4, 5], result.transcript()
    check_equal(result, expected)
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]
    assert result.values[4]["first"] == 5
