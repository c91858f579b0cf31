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


def resume_and_train(training: Training, folder: str, refreshed: bool) -> dict[str, Any]:
    """The optimizer comes after ``initialize``, as in diffusion-pipe, and before the script loads."""
    engine = build(training)
    parameters = list(engine.module.parameters())
    engine._configure_optimizer(lambda listed: torch.optim.AdamW(listed, lr=0.02), parameters)
    engine._support_torch_style_backward = True  # as scripts set it for a pipeline without an optimizer
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
    if refreshed and training.faults is not None:
        engine.refresh_shadows()
    found, _ = engine.load_checkpoint(folder)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses = [float(engine.train_batch(data)) for _ in range(training.steps)]
    if found is None:
        engine.save_checkpoint(folder, tag="end")
    digest = engine.state_digest() if training.faults is not None else None
    if training.faults is not None:
        engine.close()
    return {"losses": losses, "loaded": found is not None, "digest": digest}


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


@pytest.mark.sweep
@pytest.mark.parametrize("refreshed", [False, True])
def test_a_script_that_makes_its_optimizer_and_then_loads(jobs: Jobs, tmp_path: Path, refreshed: bool) -> None:
    folder, digests = str(tmp_path), set()

    def run(name: str, faults: list[dict[str, Any]] | None, *, survivors: list[int]) -> list[float]:
        training = Training(name, 2, settings={"optimizer": {}}, faults=faults)
        result = jobs.run(resume_and_train, world=2, training=training, folder=folder, refreshed=refreshed)
        assert result.survivors == survivors, result.transcript()
        digests.update(result.values[rank]["digest"] for rank in survivors)
        assert result.common("loaded") == (name != "saved")
        losses: list[float] = result.common("losses")
        return losses

    run("saved", None, survivors=[0, 1])
    plain = run("plain", None, survivors=[0, 1])
    digests.clear()
    assert run("undisturbed", [], survivors=[0, 1]) == plain
    for stage in (0, 1):
        assert run(f"killed-{stage}", [kill(4, 0, stage, "backward", 1)], survivors=[1 - stage]) == plain
    assert len(digests) == 1
