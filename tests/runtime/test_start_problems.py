"""What stands in the way of a start is said all at once, whichever part finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.config.section import parse_bamboo_section
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime import initialize


class Topology:
    """Two stages, one pipeline."""

    def get_dim(self, axis: str) -> int:
        return {"pipe": 2, "data": 1}[axis]

    def get_axis_names(self) -> list[str]:
        return ["pipe", "data"]

    def world_size(self) -> int:
        return 2

    def get_coord(self, rank: int) -> Any:
        return SimpleNamespace(pipe=rank, data=0)


def test_zero_an_empty_stage_pipelines_and_an_optimizer_object_are_told_together() -> None:
    model: Any = PipelineModule.__new__(PipelineModule)
    torch.nn.Module.__init__(model)
    model._topo, model.parts, model.num_stages = Topology(), [0, 3, 3], 2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError) as raised:
        initialize._validate(
            {"zero_optimization": {"stage": 3}},
            {"model": model, "optimizer": optimizer},
            parse_bamboo_section({"topology": {"pipelines": 2}}),
            seat=Seat(Grid(1, 2), 0, 1),
        )
    told = str(raised.value)
    assert len(raised.value.problems) == 5
    parts = ("can't be divided", "stage is 3", "stage 1 of 2 has no layers", "pipelines is 2", "pass a function")
    for part in parts:
        assert part in told
