"""ZeRO-1 with the optimizer on the host: what of a stage's state is nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_bamboo.runtime.recovery.stage_state import PackedState, pack_state, unpack_state
from deepspeed_bamboo.runtime.stock.gradients import kept_gradients
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build

OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.sweep
def test_a_copy_brings_the_gradients_that_a_later_step_may_apply_again(jobs: Jobs) -> None:
    result = jobs.run(copy_state, world=1)
    assert result.values[0] == {"some": True, "same": True}, result.transcript()


def copy_state() -> dict[str, Any]:
    engine = build(Training("copied", 1, settings=OFFLOADED, faults=[]))
    engine.train_batch(models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4))
    (replica,) = engine._stage_host.owned.values()
    engine._stage_host.save()
    packed = pack_state(replica)
    copied = PackedState(packed.structure, [tensor.clone() for tensor in packed.tensors])
    gradients = kept_gradients(replica.attributes["optimizer"])
    expected = [gradient.clone() for gradient in gradients]
    for gradient in gradients:
        gradient.zero_()
    unpack_state(replica, copied)
    engine.close()
    some = any(bool(gradient.any()) for gradient in expected)
    return {"some": some, "same": all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))}
