"""What a stage and its shadow take on a worker is what ``ds_bamboo plan --config`` says."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_bamboo.doctor.memory import bytes_each
from deepspeed_bamboo.runtime.membership.device_memory import state_bytes
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, settings_of


def train_measured(training: Training) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state, measured when a stage, or its shadow, is about to step."""
    engine = build(training)
    iterator = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    found: dict[str, list[int]] = {}

    def measure(name: str, replica: Any) -> None:
        storages = {}
        for group in replica.attributes["basic_optimizer"].param_groups:
            for parameter in group["params"]:
                state = replica.attributes["basic_optimizer"].state[parameter].values()
                for tensor in (parameter, parameter.grad, *state):
                    if hasattr(tensor, "untyped_storage"):
                        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        parameters = sum(parameter.numel() for parameter in replica.module.parameters())
        found[name] = [sum(storages.values()), parameters, state_bytes(replica)]

    while engine.global_steps < training.steps:
        if engine.global_steps == training.steps - 1:
            for kind, replicas in (("owned", engine.host.owned), ("shadow", engine.host.shadows)):
                for coordinate, replica in replicas.items():
                    replica.attributes["basic_optimizer"].register_step_pre_hook(
                        lambda *_, name=f"{kind} {coordinate}", replica=replica: measure(name, replica)
                    )
        engine.train_batch(iterator)
    engine.close()
    return found


def test_state_takes_what_is_estimated(jobs: Jobs) -> None:
    training = Training("measured", 2, count=4, faults=[])
    result = jobs.run(train_measured, world=2, training=training)
    found = {name: sizes for value in result.values.values() for name, sizes in value.items()}
    assert sorted(found) == ["owned 0.0", "owned 0.1", "shadow 0.0", "shadow 0.1"], result.transcript()
    each = bytes_each(settings_of(training), 1)
    for measured, parameters, by_engine in found.values():
        assert measured == pytest.approx(parameters * each, rel=0.05)
        assert by_engine == pytest.approx(measured, rel=0.02)
