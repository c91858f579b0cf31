"""Schedulers whose ``load_state_dict`` adds to what they have, as Megatron's does: nothing is counted twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.stock.scheduler_state import NumbersBefore, set_scheduler_state
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build_module, fresh_process_group
from tests.runtime.test_losses import kill

TRAINING = Training("adding", 2, steps=6, faults=[])


class Adding:
    """Halves the rate every 40 samples."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.rate = optimizer.param_groups[0]["lr"]
        self.samples = 0

    def step(self, increment: int) -> None:
        """DeepSpeed passes the batch's samples where a call without arguments fails."""
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * 0.5 ** (self.samples / 40)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]
        self.step(state["samples"])


def train(training: Training, own: str, kept: str | None = None) -> dict[str, Any]:
    """Continues from what is in ``own``, and saves there; ``kept``: where the plugin keeps its own checkpoints."""
    checkpoint = {"dir": kept, "interval_minutes": 1e-9} if kept is not None else {}
    training = dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint})
    fresh_process_group(training.name)
    torch.manual_seed(11)
    layers, loss = models.plain(training.count), models.squared_error
    module = PipelineModule(layers=layers, loss_fn=loss, num_stages=training.stages, partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    given = {"optimizer": optimizer, "lr_scheduler": Adding(optimizer)}
    engine = build_module(training, lambda: module, fresh=False, **given)
    engine.load_checkpoint(own)
    first = engine.global_steps
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    for _ in range(0 if kept else first * training.micro_batches):
        next(data)
    said = {}
    for step in range(first, training.steps):
        loss = float(engine.train_batch(data))
        said[str(step)] = [loss, engine.lr_scheduler.samples, engine.lr_scheduler.get_last_lr()]
    if kept is None:
        engine.save_checkpoint(own)
    if training.faults is not None:
        engine.close()
    return {"said": said}


def train_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One after the other."""
    return {name: train(**run) for name, run in runs.items()}


@pytest.mark.parametrize("killed", [None, 0, 1])
def test_a_job_that_goes_on_has_the_rates_that_stock_has(jobs: Jobs, tmp_path: Path, killed: int | None) -> None:
    """By a checkpoint of the script's; then a stage is lost."""

    def runs(kind: str, faults: Any) -> dict[str, Any]:
        made = {}
        for steps in (3, 6):
            its = faults if steps == 6 or faults is None else []
            training = dataclasses.replace(TRAINING, name=f"{kind}-{killed}-{steps}", steps=steps, faults=its)
            made[str(steps)] = {"training": training, "own": str(tmp_path / kind)}
        return made

    plain = jobs.run(train_all, world=2, runs=runs("stock", None))
    faults = [] if killed is None else [kill(4, 0, killed, "backward", 1)]
    result = jobs.run(train_all, world=2, runs=runs("plugin", faults))
    assert len(result.survivors) == 2 - len(faults), result.transcript()
    for steps in ("3", "6"):
        assert result.common(steps) == plain.common(steps), result.transcript()


def test_a_job_that_is_started_again_has_the_rates_that_it_had(jobs: Jobs, tmp_path: Path) -> None:
    """By a checkpoint of the plugin's."""

    def run(steps: int, kept: str) -> dict[str, Any]:
        training = dataclasses.replace(TRAINING, name=f"again-{kept}-{steps}", steps=steps)
        return {"training": training, "own": str(tmp_path / "none"), "kept": str(tmp_path / kept)}

    result = jobs.run(train_all, world=2, runs={"whole": run(6, "a"), "short": run(3, "b"), "again": run(6, "b")})
    whole, again = result.common("whole")["said"], result.common("again")["said"]
    assert {step: its for step, its in again.items() if int(step) >= 3} == {step: whole[step] for step in "345"}


def test_a_state_is_set_whatever_was_there() -> None:
    """Also with the group's rate that belongs to it; one that sets what it loads is loaded once."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    adding = Adding(optimizer)
    for before, wanted in ((0, 24), (24, 24), (64, 24), (0, 0), (64, 0)):
        adding.samples = before
        set_scheduler_state(adding, {"samples": wanted, "rate": 0.1})
        assert adding.samples == wanted and adding.get_last_lr() == [0.1 * 0.5 ** (wanted / 40)]
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    setting = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=0.1), 2)
    state, loads = setting.state_dict(), []
    setting.load_state_dict = lambda its: loads.append(its)  # type: ignore[method-assign]
    set_scheduler_state(setting, state)
    assert loads == [state]


class Overriding(Adding):
    """Keeps its own rate, and an own length of its warm-up, where the state has others: Megatron's with its option."""

    warmup = 8

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "warmup": self.warmup}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step(state["samples"])


@pytest.mark.parametrize("samples", [0, 24])
@pytest.mark.parametrize("warmup", [0, 3])
def test_what_a_scheduler_keeps_of_its_own_stays(samples: int, warmup: int) -> None:
    """And what it counts is counted once, also where the state has 0 of something."""
    scheduler = Overriding(SimpleNamespace(param_groups=[{"lr": 0.1}]))
    scheduler.samples, scheduler.warmup = samples, 8
    set_scheduler_state(scheduler, {"samples": 40, "rate": 0.7, "warmup": warmup})
    assert (scheduler.samples, scheduler.rate, scheduler.warmup) == (40, 0.1, 8)
    set_scheduler_state(scheduler, {"samples": 0, "rate": 0.0, "warmup": warmup})
    assert (scheduler.samples, scheduler.rate, scheduler.warmup) == (0, 0.1, 8)


def test_a_load_that_is_done_again_starts_from_what_was_before() -> None:
    """As many attempts as losses need, of several schedulers."""
    one, other = (Adding(SimpleNamespace(param_groups=[{"lr": 0.1}])) for _ in range(2))
    one.samples, numbers = 5, NumbersBefore()
    for _ in range(3):
        for scheduler in (one, other):
            numbers.again(scheduler)
            scheduler.load_state_dict({"samples": 24, "rate": 0.1})
    assert (one.samples, other.samples) == (29, 24)
