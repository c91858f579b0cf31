"""Features of DeepSpeed's pipelines that models use: as with DeepSpeed's own engine, and the same after losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build
from tests.runtime.test_losses import kill

CASE = Training("features", 3, steps=4)
FAULTS = [kill(1, 0, 2, "backward", 1), kill(2, 0, 0, "forward", 2)]


def train_with_everything(training: Training, *, returns_loss: bool) -> dict[str, list[Any]]:
    """Additional losses, a scheduler made by a function, shapes that vary, evaluations that return logits."""
    if returns_loss:
        training = dataclasses.replace(training, layers="scored", module={"loss_fn": None})
    training = dataclasses.replace(training, module={**training.module, "dynamic_shape": True})
    engine = build(training, module_class=models.Penalised, lr_scheduler=halving)
    seen: dict[str, list[Any]] = {name: [] for name in ("losses", "penalties", "rates", "evaluations", "logits")}
    batches = varying(0)
    for step in range(training.steps):
        seen["losses"].append(float(engine.train_batch(batches)))
        seen["penalties"].append(float(engine.get_additional_losses()["penalty"]))
        seen["rates"].append(engine.get_lr()[0])
        loss, logits = engine.eval_batch(varying(100 + step), return_logits=True)
        seen["evaluations"].append(float(loss))
        # Only the last stage's worker has them.
        mean = torch.zeros(()) if logits is None else logits.float().mean()
        torch.distributed.all_reduce(mean)
        seen["logits"].append(float(mean))
    if training.faults is not None:
        engine.close()
    return seen


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def varying(pipeline: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one, two and three samples."""
    for index, (x, target) in enumerate(
        models.micro_batches(
            lambda *name: models.vectors(*name, size=3), pipeline=pipeline, first_step=0, count=CASE.micro_batches
        )
    ):
        yield x[: 1 + index % 3], target[: 1 + index % 3]


def train_each() -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Every kind of model with DeepSpeed's engine, with the plugin's, and (the last one only) with losses."""
    results: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for returns_loss in (False, True):
        kind = "returns-loss" if returns_loss else "has-loss-function"
        results[kind] = {}
        for name, faults in (("stock", None), ("whole", []), ("killed", FAULTS)):
            if name != "killed" or returns_loss:
                training = dataclasses.replace(CASE, name=f"{kind}-{name}", faults=faults)
                results[kind][name] = train_with_everything(training, returns_loss=returns_loss)
    return results


def test_as_stock_and_equal_after_losses(jobs: Jobs) -> None:
    result = jobs.run(train_each, world=3)
    assert sorted(code or 0 for code in result.codes) == [-9, -9, 0], result.transcript()
    (survivor,) = result.survivors
    seen = result.values[survivor]
    for kind, runs in seen.items():
        for run, values in runs.items():
            for name in runs["stock"]:
                assert values[name] == runs["stock"][name], f"{kind}: {name}, {run}"
        assert len(set(runs["stock"]["rates"])) == CASE.steps, kind
        assert all(runs["stock"]["logits"]), kind
