"""A job that has ended is started again for more steps: what is new at once after its last step is done."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build

TRAINING = Training("more-1x2", 2, steps=8, faults=[])
ENDS_AT = 6


def train(training: Training, kind: str, kept: str | None, own: str) -> dict[str, Any]:
    """A loop that counts by itself.

    ``kind``: "rates" are set before each step, "decays" multiplies them after it, "both" sets them where they have
    decayed; "looks" evaluates before some steps, and saves before these and before the first one.
    """
    checkpoint = {"dir": kept, "interval_minutes": 60} if kept is not None else {}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    data, held_out = (
        models.micro_batches(models.vectors, pipeline=0, first_step=first, count=training.micro_batches)
        for first in (0, 100)
    )
    groups = engine.optimizer.param_groups
    losses, looks, saved = [], {}, {}
    for step in range(training.steps):
        if kind in ("rates", "both"):
            for group in groups:
                group["lr"] = 0.01 / (1 + step) if kind == "rates" else group["lr"] * 0.75
        if kind == "looks" and step % 3 == 0:
            looks[step] = float(engine.eval_batch(held_out))
            engine.save_checkpoint(own, tag=f"before-{step}")
        losses.append(float(engine.train_batch(data)))
        if kind in ("decays", "both"):
            for group in groups:
                group["lr"] *= 0.5
    digest = engine.state_digest() if kept is None or training.steps > ENDS_AT else ""
    engine.close()
    for folder in sorted(Path(own).glob("before-*")):
        state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
        saved[folder.name] = state["global_steps"]
    return {"losses": losses, "looks": looks, "digest": digest, "saved": saved}


def train_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several, one after the other; results by kind."""
    return {kind: train(kind=kind, **run) for kind, run in runs.items()}


@pytest.mark.parametrize("kinds", [("rates", "decays"), pytest.param(("both",), marks=pytest.mark.sweep), ("looks",)])
def test_the_first_new_step_is_as_in_a_job_that_never_ended(jobs: Jobs, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    def runs(steps: int, *, kept: bool) -> dict[str, dict[str, Any]]:
        made = {}
        for kind in kinds:
            named = dataclasses.replace(TRAINING, name=f"{kind}-{steps}-{kept}", steps=steps)
            folder = str(tmp_path / kind) if kept else None
            made[kind] = {"training": named, "kept": folder, "own": str(tmp_path / f"own-{kind}-{kept}")}
        return made

    whole = jobs.run(train_all, world=2, runs=runs(TRAINING.steps, kept=False))
    jobs.run(train_all, world=2, runs=runs(ENDS_AT, kept=True))
    again = jobs.run(train_all, world=2, runs=runs(TRAINING.steps, kept=True))
    for kind in kinds:
        assert again.common(kind) == whole.common(kind), again.transcript()
    if "looks" in kinds:
        assert whole.common("looks")["saved"] == {"before-0": 0, "before-3": 3, "before-6": 6}
        assert "save_checkpoint writes nothing before the first step" in again.transcript()
