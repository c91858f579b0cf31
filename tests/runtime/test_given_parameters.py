"""``model_parameters`` where one worker begins with several stages: each stage trains its own part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.given_parameters import GivenParameters, refuse_strangers
from deepspeed_bamboo.runtime.stock.optimizers import maker_for
from deepspeed_bamboo.runtime.stock.strangers import listed, problem_with_strangers, strangers


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


def test_groups_stay_the_dictionaries_that_the_script_has() -> None:
    module, first = whole(), stage(0, 1)
    groups = [{"params": (layer.bias for layer in module), "lr": 0.1}, module[2].weight]
    given = listed(iter(groups))
    left = GivenParameters.of(given, module).left_in(first, given)
    assert left[0] is groups[0] and names_in(first, left) == [{"params": ["0.bias", "1.bias"], "lr": 0.1}]


class Block(nn.Module):
    """A part of a model that every rank has whole."""

    def __init__(self, inner: nn.Module, *more: Any) -> None:
        super().__init__()
        self.inner = inner


def test_what_belongs_to_no_stage_is_refused_and_what_is_another_stages_is_left_out() -> None:
    model, criterion, head = whole(), nn.Linear(2, 1), nn.Linear(2, 2)
    ready, frozen = nn.Linear(3, 3), nn.Linear(5, 5).requires_grad_(False)
    module: Any = nn.ModuleDict({"0": Block(model[0])})
    module._layer_specs = [
        LayerSpec(Block, model[0]),
        LayerSpec(Block, inner=[model[1]][0]),
        LayerSpec(Block, lambda: model[2]),
        ready,
        lambda x: head(x),  # uses weights that no layer has
    ]
    its = [*model[0].parameters(), *model[1].parameters(), {"params": [*model[2].parameters(), *ready.parameters()]}]
    assert not list(strangers([*its, *frozen.parameters()], module))
    given = [*its, {"params": [("scale", criterion.weight), criterion.bias]}, *head.parameters()]
    found = list(strangers(given, module))
    assert list(map(id, found)) == list(map(id, [*criterion.parameters(), *head.parameters()]))
    [told] = problem_with_strangers(given, module, where="model_parameters")
    assert told.startswith("model_parameters has 4 parameters that are not the PipelineModule's, of shape (1, 2), (1,)")
    assert "as loss_fn of the PipelineModule" in told
    left = GivenParameters.of(its, module).within(module)
    assert names_in(module, left) == ["0.inner.weight", "0.inner.bias", {"params": []}]


def test_an_optimizer_with_what_belongs_to_no_stage_is_refused() -> None:
    module, criterion = stage(0, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*module.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="the optimizer has 2 parameters that are not the PipelineModule's"):
        refuse_strangers(optimizer, module)
    refuse_strangers(torch.optim.SGD(module.parameters(), lr=0.1), module)
