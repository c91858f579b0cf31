"""What travels between stages and what layers may be: equal to one plain torch process, also after losses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deepspeed.pipe import LayerSpec

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import SGD, Training, train_all
from tests.runtime.test_losses import ONE_BY_FOUR

CASES = [
    Training("mixed", 4, layers="mixed", steps=5, settings={"optimizer": SGD}),
    Training("ready", 4, layers="ready", steps=5, settings={"optimizer": SGD}, module={"dynamic_shape": True}),
]


def oracle(training: Training) -> list[float]:
    """The losses of plain torch on one process: every micro-batch's loss divided by their number."""
    specs = getattr(models, training.layers)(training.count)
    layers = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in specs]
    parameters = [p for layer in layers if isinstance(layer, torch.nn.Module) for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    batches = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses = []
    for _ in range(training.steps):
        total = torch.zeros(())
        for _ in range(training.micro_batches):
            x, target = next(batches)
            for layer in layers:
                x = layer(x)
            loss = models.squared_error(x, target)
            total += loss.detach()
            (loss / training.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / training.micro_batches))
    return losses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_plain_torch_and_equal_through_three_losses(jobs: Jobs, case: Training) -> None:
    whole = dataclasses.replace(case, name=f"{case.name}-whole", faults=[])
    killed = dataclasses.replace(case, name=f"{case.name}-killed", faults=ONE_BY_FOUR)
    result = jobs.run(train_all, world=4, trainings=[whole, killed])
    assert result.codes.count(-9) == 3, result.transcript()
    losses = result.common(whole.name)["losses"]
    assert result.common(killed.name)["losses"] == losses
    # A tensor that is sent twice gets its two gradients added in another order than within one graph.
    assert losses == pytest.approx(oracle(case), rel=1e-6)
