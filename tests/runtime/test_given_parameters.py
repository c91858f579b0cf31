"""``model_parameters`` where one worker begins with several stages: each stage trains its own part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.given_parameters import GivenParameters
from deepspeed_bamboo.runtime.stock.optimizers import maker_for


def whole() -> nn.Sequential:
    """Four layers, of which the last shares its weight with the first."""
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    module[3].weight = module[0].weight
    return module


def stage(*numbers: int) -> nn.Module:
    """Copies of some of the layers, under the names that they have in the whole."""
    module = nn.Module()
    for number in numbers:
        module.add_module(str(number), nn.Linear(2, 2))
    return module


def names_in(module: nn.Module, found: list[Any]) -> list[Any]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {**item, "params": names_in(module, item["params"])}
        if isinstance(item, dict)
        else (item[0], names[id(item[1])])
        if isinstance(item, tuple)
        else names[id(item)]
        for item in found
    ]


def test_each_stage_has_its_part_of_the_groups_in_the_scripts_order() -> None:
    module = whole()
    groups = [
        {"params": [module[2].weight, module[0].weight], "lr": 0.1},
        {"params": (layer.bias for layer in module), "weight_decay": 0.0},
    ]
    given = GivenParameters.of(iter(groups), module)
    first, second = stage(0, 1), stage(2, 3)
    assert names_in(first, given.within(first)) == [
        {"params": ["0.weight"], "lr": 0.1},
        {"params": ["0.bias", "1.bias"], "weight_decay": 0.0},
    ]
    # What the first and the last layer share is each stage's own.
    assert names_in(second, given.within(second)) == [
        {"params": ["2.weight", "3.weight"], "lr": 0.1},
        {"params": ["2.bias", "3.bias"], "weight_decay": 0.0},
    ]


def test_parameters_that_the_script_leaves_out_are_in_no_stage() -> None:
    module, second = whole(), stage(2, 3)
    given = GivenParameters.of((p for name, p in module.named_parameters() if name != "2.bias"), module)
    assert names_in(second, given.within(second)) == ["3.weight", "2.weight", "3.bias"]
    assert given.within(stage(7)) == []


def test_named_parameters_and_a_lone_one_in_a_group() -> None:
    module, first = whole(), stage(0, 1)
    given = GivenParameters.of([{"params": module[1].bias}, {"params": [("mine", module[0].weight)]}], module)
    assert names_in(first, given.within(first)) == [{"params": ["1.bias"]}, {"params": [("mine", "0.weight")]}]


def test_a_function_that_makes_groups_of_other_parameters_is_refused() -> None:
    module, other = stage(0, 1), stage(2, 3)

    def made_for(its: Any) -> Any:
        return maker_for(lambda _: torch.optim.SGD(its, lr=0.1), configured=list, described=None, module=module)

    make = made_for(other.parameters())
    with pytest.raises(ConfigError, match="one for 4 parameters that are not among those that it is called with"):
        make(list(module.parameters()))
    assert len(made_for(module.parameters())(list(module.parameters())).param_groups[0]["params"]) == 4
