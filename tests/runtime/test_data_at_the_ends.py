"""Iterators on first and last stages alone: as DeepSpeed wants it, and as many scripts have it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.protocol import EXIT_EXPELLED
from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build
from tests.runtime.test_losses import kill

EAGER = {"redundancy": {"mode": "eager", "overlap": True, "offload": "none"}}


def train_at_the_ends(training: Training, halves: bool = False, only_first: bool = False) -> dict[str, Any]:
    """``halves``: the first stage has inputs without labels, the last one labels without inputs."""
    engine = build(training)
    first, last = engine.is_first_stage(), engine.is_last_stage()

    def source(start: int) -> Iterator[Any] | None:
        if not first and (only_first or not last):
            return None
        return part(models.micro_batches(models.vectors, pipeline=start, first_step=0, count=4))

    def part(batches: Iterator[Any]) -> Iterator[Any]:
        for x, y in batches:
            yield (x if first or not halves else None, y if last or not halves else None)

    data, evaluated = source(0), source(100)
    if getattr(engine, "memory", None) is not None:
        engine.memory.share_of_time = math.inf  # on a loaded machine copying takes long
    losses, evaluations = [], []
    for _ in range(training.steps):
        if getattr(engine, "memory", None) is not None:
            engine.memory.wait()
        losses.append(float(engine.train_batch(data)))
        evaluations.append(float(engine.eval_batch(evaluated)))
    result = {"losses": losses, "evaluations": evaluations}
    if training.faults is not None:
        engine.close()
    return result


@pytest.mark.parametrize(
    "bamboo", [pytest.param({}, id="lazy", marks=pytest.mark.sweep), pytest.param(EAGER, id="eager")]
)
def test_the_loss_of_the_last_stage_is_survived_and_who_is_left_with_data_is_said(
    jobs: Jobs, bamboo: dict[str, Any]
) -> None:
    case = Training(f"ends-{len(bamboo)}", 3, bamboo=bamboo, steps=4)
    plain = jobs.run(train_at_the_ends, world=3, training=case)
    killed = dataclasses.replace(case, name=f"{case.name}-killed", faults=[kill(1, 0, 2, "backward", 1)])
    result = jobs.run(train_at_the_ends, world=3, training=killed)
    assert result.survivors == [0, 1], result.transcript()
    for what in ("losses", "evaluations"):
        assert result.common(what) == plain.common(what)
    assert "only w0 has the data of pipeline 0: its loss ends the job" in result.transcript()


def train_where_an_end_is_hosted(training: Training) -> dict[str, Any]:
    """Asks before each step whether this worker hosts an end, and only then begins to read, at the data's start."""
    engine = build(training)
    data, losses = None, []
    for _ in range(training.steps):
        if data is None and (engine.is_first_stage() or engine.is_last_stage()):
            data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4)
        losses.append(float(engine.train_batch(data)))
    if training.faults is not None:
        engine.close()
    return {"losses": losses}


def test_an_iterator_that_begins_after_a_loss_is_not_read(jobs: Jobs) -> None:
    case = Training("late-data", 3, steps=4)
    plain = jobs.run(train_where_an_end_is_hosted, world=3, training=case)
    killed = dataclasses.replace(case, name="late-data-killed", faults=[kill(1, 0, 2, "backward", 1)])
    result = jobs.run(train_where_an_end_is_hosted, world=3, training=killed)
    assert result.survivors == [0, 1], result.transcript()
    assert result.common("losses") == plain.common("losses")
    assert "the script of w1 passes a data iterator for the first time in step 2" in result.transcript()


@pytest.mark.parametrize(
    ("more", "message"),
    [({"halves": True}, "yields no "), ({"only_first": True}, "may have to take 0.0 over")],
    ids=["halves", "one worker"],
)
def test_too_little_for_any_loss_is_refused_at_the_first_step(jobs: Jobs, more: dict[str, bool], message: str) -> None:
    training = Training(f"little-{next(iter(more))}", 3, faults=[])
    result = jobs.run(train_at_the_ends, world=3, training=training, **more)
    assert result.survivors == [] and set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    assert message in result.transcript()


ENDS = {
    # What is lost: one worker after the other, or both at once with the last copy of the first stage.
    "one by one": [kill(1, 0, 2, "backward", 1), kill(3, 0, 0, "backward", 1)],
    "in an evaluation": [kill(1, 0, 2, "backward", 1), kill(3, 0, 0, "forward", 1)],  # the first ones of that step
    "at once": [kill(4, 0, stage, "forward", 1) for stage in (0, 2)],
}


@pytest.mark.parametrize(
    "how", ["one by one", *(pytest.param(how, marks=pytest.mark.sweep) for how in ENDS if how != "one by one")]
)
@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_the_loss_of_all_that_have_data_ends_the_job_as_a_loss(
    jobs: Jobs, tmp_path: Path, how: str, waits: bool
) -> None:
    """It is no fault of the script's: with checkpoints all start anew, else the same command can be started again."""
    store = {"dir": str(tmp_path / "kept")} if waits else {}
    checkpoint = {"memory_interval_seconds": 1e-9, "memory_copies": 2, **store}
    training = Training(f"no-data-{len(how)}-{waits}", 3, steps=6, faults=ENDS[how], bamboo={"checkpoint": checkpoint})
    result = jobs.run(train_at_the_ends, world=3, training=training)
    assert result.codes == [-9, EXIT_EXPELLED if waits else EXIT_JOB_FAILED, -9], result.transcript()
    told, what = result.transcript(), "evaluation data" if how == "in an evaluation" else "data"
    assert f"nobody is left who has the {what} of 0.0 (pipeline.stage)" in told, told
    assert ("all workers start anew since nobody is left" in told) == waits
