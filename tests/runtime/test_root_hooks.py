"""Hooks that a script puts on its PipelineModule after ``initialize`` are on all modules of its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepspeed_bamboo.runtime.stock.root_hooks import RootHooks


class Root(nn.Module):
    """A module that returns what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def halved(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def doubled(module: nn.Module, inputs: Any) -> Any:
    return tuple(2 * its for its in inputs)


def outputs(host: Any) -> list[float]:
    return [float(replica.module(torch.ones(1))) for replica in host.built()]


def worker_with(count: int) -> Any:
    stages = [SimpleNamespace(module=Root()) for _ in range(count)]
    return SimpleNamespace(built=lambda: stages, shown=lambda: stages[0], active=None, stages=stages)


def test_what_is_put_on_one_is_on_all_and_goes_with_it() -> None:
    host = worker_with(3)
    hooks = RootHooks(host)
    first = host.shown().module.register_forward_hook(halved)
    hooks.carry()
    hooks.carry()
    assert outputs(host) == [0.5, 0.5, 0.5]
    host.shown().module.register_forward_pre_hook(doubled)
    host.shown().module.register_forward_hook(halved)
    hooks.carry()
    assert outputs(host) == [0.5, 0.5, 0.5]
    first.remove()
    hooks.carry()
    assert outputs(host) == [1.0, 1.0, 1.0]


def test_a_stage_that_came_with_the_hooks_gets_them_once_and_another_shown_one_is_no_change() -> None:
    host = worker_with(2)
    hooks = RootHooks(host)
    for replica in host.built():
        replica.module.register_forward_hook(halved)
    hooks.carry()
    assert outputs(host) == [0.5, 0.5]
    host.shown = lambda: host.stages[1]
    hooks.carry()
    assert outputs(host) == [0.5, 0.5]
    host.shown().module.register_forward_hook(halved)
    hooks.carry()
    assert outputs(host) == [0.25, 0.25]


def test_what_is_put_on_what_the_script_gave_is_on_all_also_when_its_stage_is_elsewhere() -> None:
    host = worker_with(3)
    hooks = RootHooks(host)
    given = host.stages.pop(0).module
    hooks.carry()
    first = given.register_forward_hook(halved)
    hooks.carry()
    assert outputs(host) == [0.5, 0.5]
    given.register_forward_pre_hook(doubled)
    shown = host.shown().module.register_forward_hook(halved)
    first.remove()
    hooks.carry()
    hooks.carry()
    assert outputs(host) == [1.0, 1.0] and float(given(torch.ones(1))) == 1.0
    shown.remove()
    hooks.carry()
    assert outputs(host) == [2.0, 2.0] and float(given(torch.ones(1))) == 2.0


def test_a_worker_without_any_stage_has_nothing_to_follow() -> None:
    host: Any = SimpleNamespace(built=list, shown=lambda: None, active=None)
    RootHooks(host).carry()
    assert host.built() == []
