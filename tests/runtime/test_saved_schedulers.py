"""A scheduler that the script puts on the engine is in each stage's file, also of stages that a loss has moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import SGD, Training, build
from tests.runtime.test_losses import kill


def train_and_save(training: Training, folder: str) -> dict[str, Any]:
    engine = build(training)
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses = [float(engine.train_batch(data)) for _ in range(training.steps)]
    engine.save_checkpoint(folder, tag="end")
    if training.faults is not None:
        engine.close()
    return {"losses": losses}


def schedulers(folder: Path) -> dict[str, Any]:
    """What each stage's file has of the scheduler."""
    files = sorted((folder / "end").glob("mp_rank_*_model_states.pt"))
    return {path.name: torch.load(path, weights_only=False)["lr_scheduler"] for path in files}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_has_moved_is_saved_with_the_scheduler(jobs: Jobs, tmp_path: Path, stage: int) -> None:
    case = {"stages": 2, "settings": {"optimizer": SGD}}
    plain = jobs.run(
        train_and_save, world=2, training=Training(f"plain{stage}", **case), folder=str(tmp_path / "plain")
    )
    killed = Training(f"killed{stage}", **case, faults=[kill(1, 0, stage, "backward", 1)])
    result = jobs.run(train_and_save, world=2, training=killed, folder=str(tmp_path / "killed"))
    assert result.survivors == [1 - stage], result.transcript()
    assert result.common("losses") == plain.common("losses")
    expected = schedulers(tmp_path / "plain")
    assert len(expected) == 2 and None not in expected.values()
    assert schedulers(tmp_path / "killed") == expected
