"""Workers that are lost between two calls of the engine, and what scripts compute there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, fresh_process_group
from tests.runtime.test_losses import kill


def learns_in_time(engine: Any, step: int) -> None:
    """At the end of ``step`` every survivor knows of the loss in it."""
    stock = engine.failover.before_script

    def before_script() -> None:
        if engine.global_steps == step + 1:
            with contextlib.suppress(EpochChangedError):
                engine.session.interruption.wait_until(lambda: False, timeout_seconds=30.0)
        stock()

    engine.failover.before_script = before_script


def dies_once_returned(step: int, *, others: list[int]) -> None:
    """Kill this process after ``train_batch`` of ``step`` returned on ``others``: what follows shows it."""
    marks = [Path(os.environ["TEST_DIRECTORY"], f"returned-{step}-{other}") for other in others]
    while not all(mark.exists() for mark in marks):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_count(
    training: Training, *, known_in: int, dies_after: dict[int, int], agrees_after: int, gathers_after: int
) -> Any:
    """After each step all count the model's parameters and last stages, by an all_reduce, objects, or ``agree_on``."""
    fresh_process_group(training.name)
    engine = build(training, fresh=False)
    rank, plugin = td.get_rank(), training.faults is not None
    if plugin:
        learns_in_time(engine, known_in)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses, counted = [], []

    def own() -> list[int]:
        found = sum(parameter.numel() for parameter in engine.module.parameters())
        return [found, int(engine.is_last_stage()), int(td.get_rank() == 0)]

    while engine.global_steps < training.steps:
        step = engine.global_steps
        losses.append(float(engine.train_batch(data)))
        if plugin and step in dies_after:
            Path(os.environ["TEST_DIRECTORY"], f"returned-{step}-{rank}").touch()
        if plugin and dies_after.get(step) == rank:
            dies_once_returned(step, others=[0, *(dying for end, dying in dies_after.items() if end > step)])
        if plugin and step == agrees_after:
            counted.append([sum(its) for its in zip(*engine.agree_on("count", own).values(), strict=True)])
        elif step == gathers_after:
            outs: list[Any] = [None] * td.get_world_size()
            td.all_gather_object(outs, {name: p.numel() for name, p in engine.module.named_parameters()})
            found = {name: count for its in outs for name, count in its.items()}
            counted.append([sum(found.values()), 1, 1])
        else:
            td.all_reduce(mine := torch.tensor(own()))
            counted.append(mine.tolist())
    if plugin:
        engine.close()
    return {"losses": losses, "counted": counted}


def test_what_scripts_compute_between_steps_has_all_stages_or_a_line_names_them(jobs: Jobs) -> None:
    """One loss is known before ``train_batch`` returns, one comes to light in a gather for as many as there were, one
    in ``agree_on``.
    """
    more: dict[str, Any] = {"known_in": 1, "dies_after": {2: 1, 3: 2}, "agrees_after": 3, "gathers_after": 2}
    plain = jobs.run(train_and_count, world=4, training=Training("plain-count", 4, steps=5), **more)
    killed = Training("killed-count", 4, steps=5, faults=[kill(1, 0, 3, "step")])
    result = jobs.run(train_and_count, world=4, training=killed, **more)
    assert result.survivors == [0], result.transcript()
    assert result.common("losses") == plain.common("losses")
    counted, whole = result.common("counted"), plain.common("counted")
    assert counted[:2] + counted[3:] == whole[:2] + whole[3:], "all stages, each once"
    assert counted[2][0] < whole[2][0], "nobody had what the second one took with it"
    lines = [line for text in result.outputs.values() for line in text.splitlines() if "lost between" in line]
    assert len(lines) == 2, result.transcript()
    assert "since step 2" in lines[0] and "lacks 0.1," in lines[0]
    assert "since step 3" in lines[1] and "lacks" in lines[1]
