"""A bug of the user ends the job on every worker, with its cause, and is never taken for a lost node."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train

CASES = [
    (Training("forward", 4, layers="faulty", faults=[]), 2, "ValueError: a bug of the user's"),
    (Training("data", 4, batches=6, faults=[]), None, "StopIteration"),
    (Training("no-gradient", 4, layers="constant", faults=[]), 0, "slot 1, torch.float32, shape (2, 3)"),
]


@pytest.mark.parametrize(("training", "culprit", "message"), CASES, ids=lambda value: getattr(value, "name", None))
def test_ends_the_job_everywhere(jobs: Jobs, training: Training, culprit: int | None, message: str) -> None:
    result = jobs.run(train, world=4, training=training)
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    raised = [rank for rank, code in enumerate(result.codes) if code == EXIT_USER_ERROR]
    assert raised and (culprit is None or culprit in raised), result.transcript()
    for rank in range(4):
        told = message if rank in raised else "the job failed on worker w"
        assert told in result.outputs[rank], f"rank {rank}: {result.transcript()}"


def test_one_stage_pipelines_need_a_data_source(jobs: Jobs) -> None:
    """The shadow of (d, 0) is in the next pipeline: said before training, not at the first failover."""
    result = jobs.run(train_without_source, world=2)
    assert result.codes.count(EXIT_USER_ERROR) >= 1
    raised = result.codes.index(EXIT_USER_ERROR)
    assert "engine.set_data_source(lambda pipeline, step: iterator)" in result.outputs[raised]


def train_without_source() -> None:
    from tests.runtime import models
    from tests.runtime.scenarios import build

    engine = build(Training("no-source", 1, faults=[]))
    pipeline = engine.grid.get_data_parallel_id()
    engine.train_batch(models.micro_batches(models.vectors, pipeline=pipeline, first_step=0, count=4))
