"""The checks that the engine makes before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.config.requirements import ModelKind, ModelShape, validate_deepspeed_settings
from deepspeed_bamboo.errors import ConfigError

GOOD: dict[str, Any] = {
    "settings": {"zero_optimization": {"stage": 1}},
    "model": ModelKind.PIPELINE,
    "model_name": "PipelineModule",
    "stages": 2,
    "world_size": 4,
}


PIPE_DATA = ModelShape({"pipe": 2, "data": 2}, ((0, 0), (1, 0), (0, 1), (1, 1)), (0, 3, 6))


def validate(**changes: Any) -> None:
    facts = {**GOOD, **changes}
    validate_deepspeed_settings(facts.pop("settings"), **facts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"settings": {}},
        {"settings": {"zero_optimization": True}},
        {"settings": {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}},
        {"settings": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}},
        {"settings": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}},
        {"settings": {"tensor_parallel": {"autotp_size": 1}}},
        {"settings": {"comms_logger": {"enabled": False, "prof_all": True}}},
        {"settings": {"comms_logger": {"verbose": True}}},
        {"settings": {"comms_logger": {"enabled": True, "prof_all": False}}},
        {"settings": {"torch_autocast": {"enabled": False, "dtype": "float16"}}},
        {"settings": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
        {"settings": {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "zero_optimization": {"stage": 1}}},
        {"settings": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}},
        {"settings": {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": False}}}}},
        {"settings": {"data_efficiency": {"data_routing": {"random_ltd": {}}}, "expert_parallel": {}}},
        {"stages": 4},
        {"stages": 1, "world_size": 3},
        {"shape": PIPE_DATA},
        {"shape": replace(PIPE_DATA, axes={"pipe": 2, "data": 2, "model": 1})},
    ],
)
def test_supported(changes: dict[str, Any]) -> None:
    validate(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"settings": {"zero_optimization": {"stage": 2}}}, ["stage is 2", "1 or 0"]),
        ({"settings": {"zero_optimization": {"stage": 3}}}, ["stage is 3", "1 or 0"]),
        (
            {"settings": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}},
            ["offload_optimizer.device is 'nvme'", 'set it to "cpu" or "none"'],
        ),
        (
            {"settings": {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}},
            ["offload_param.device is 'cpu'", 'set it to "none"'],
        ),
        (
            {"settings": {"zero_optimization": {"stage": 1, "zenflow": {}}}},
            ["zenflow is set", "leave zenflow out"],
        ),
        ({"settings": {"tensor_parallel": {"autotp_size": 4}}}, ["autotp_size is 4", "set it to 0"]),
        ({"settings": {"comms_logger": {"enabled": True}}}, ["comms_logger.enabled is true", "set it to false"]),
        (
            {"settings": {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}}},
            ["comms_logger.enabled is true"],
        ),
        (
            {"settings": {"torch_autocast": {"enabled": True, "dtype": "float16"}}},
            ["torch_autocast.dtype is float16 without ZeRO", 'section "fp16"'],
        ),
        (
            {"settings": {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}},
            ["curriculum_learning.enabled is true", "set it to false", "engine.set_data_source"],
        ),
        (
            {"settings": {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}},
            ["random_ltd.enabled is true", "set it to false"],
        ),
        ({"settings": {"expert_parallel": {"enabled": True}}}, ["expert_parallel.enabled is true", "set it to false"]),
        ({"model": ModelKind.OTHER, "model_name": "Linear"}, ["Linear", "PipelineModule", "enabled"]),
        ({"model": ModelKind.DUALPIPEV, "model_name": "DualPipeVModule"}, ["DualPipeV is not supported"]),
        ({"stages": 3}, ["4 workers", "3 stages", "3 or 6"]),
        ({"stages": 8}, ["4 workers", "8 stages", "start 8 workers"]),
        ({"shape": replace(PIPE_DATA, axes={"pipe": 2, "data": 1, "model": 2})}, ["model 2", "tensor parallelism"]),
        (
            {"shape": ModelShape({"data": 2, "pipe": 2}, ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 3, 6))},
            ["order data, pipe", 'put "pipe" before "data"'],
        ),
        ({"shape": replace(PIPE_DATA, axes={"data": 4})}, ['no axis "pipe"', "PipeDataParallelTopology"]),
        ({"shape": replace(PIPE_DATA, bounds=(0, 3, 3))}, ["stage 1 of 2 has no layers", "fewer stages"]),
    ],
)
def test_refused_with_value_rule_and_remedy(changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(**changes)
    assert len(caught.value.problems) == 1
    for part in expected:
        assert part in str(caught.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(settings={"zero_optimization": {"stage": 3}}, stages=3, model=ModelKind.DUALPIPEV)
    assert len(caught.value.problems) == 3
