"""What hooks keep from call to call, read, sent and given to another replica; without processes."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed_bamboo.core.replica_differences import differences
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.stock.description import describe
from deepspeed_bamboo.runtime.stock.held_fitting import Examples, Fitting
from deepspeed_bamboo.runtime.stock.held_values import Reader
from deepspeed_bamboo.runtime.stock.hook_values import (
    HookState,
    MovingHooks,
    accept_hook_state,
    hook_state,
    read_hooks,
    separate_hooks,
    unsendable_changes,
)
from deepspeed_bamboo.runtime.stock.likeness import liken
from deepspeed_bamboo.runtime.stock.plain_forms import Parts

CPU = torch.device("cpu")
SEEN: list[float] = []


class Stage(nn.Module):
    """Like a PipelineModule of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = [nn.Linear(2, 2), nn.Linear(2, 2)]
        for index, layer in enumerate(self.forward_funcs):
            self.add_module(str(index), layer)


class Average:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=3)
        self.mean, self.table = torch.zeros(2), np.zeros(2)
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, gradient: Tensor) -> Tensor:
        self.norms.append(float(gradient.norm()))
        self.mean = 0.5 * self.mean + gradient.reshape(-1)[:2]
        self.table += len(self.norms)
        noise = torch.rand((), generator=self.generator)
        return gradient * (sum(self.norms) + float(self.table.sum()) + noise) + self.mean.sum()


def counting() -> Callable[..., Any]:
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * calls

    return hook


def together() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two hooks that share a count and a list."""
    calls, seen = 0, []

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return output * calls

    def backward(gradient: Tensor) -> Tensor:
        return gradient * (calls + sum(seen))

    return forward, backward


def in_defaults(gradient: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 (that is what is tried)
    seen.append(1)
    return gradient * len(seen)


def scaled(gradient: Tensor, state: dict[str, int]) -> Tensor:
    state["n"] = state.get("n", 0) + 1
    return gradient * state["n"]


def in_a_global(gradient: Tensor) -> Tensor:
    SEEN.append(1.0)
    return gradient * len(SEEN)


class Locked(Average):
    """Holds what can't be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def hooked() -> Stage:
    stage = Stage()
    first, second = stage.forward_funcs
    first.weight.register_hook(Average())
    first.bias.register_hook(Average().__call__)
    second.weight.register_hook(counting())
    second.bias.register_hook(in_defaults)
    second.bias.register_hook(functools.partial(scaled, state={}))
    forward, backward = together()
    second.register_forward_hook(forward)
    second.weight.register_hook(backward)
    first.weight.register_hook(backward)
    return stage


def trained(stage: Stage, steps: int) -> list[Tensor]:
    """Gradients after ``steps`` passes."""
    for _ in range(steps):
        stage.zero_grad()
        stage.forward_funcs[1](stage.forward_funcs[0](torch.ones(1, 2))).sum().backward()
    return [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None]


def sent(state: HookState | None) -> HookState:
    made: HookState = decode(encode(state))
    return made


def replica_of(owner: Stage) -> Stage:
    replica = Stage()
    liken(replica, decode(encode(describe(owner, None))), examples=[], device=CPU)
    replica.load_state_dict(owner.state_dict())
    return replica


@given(before=st.integers(0, 3), after=st.integers(1, 3))
def test_a_replica_goes_on_where_its_owner_was_whatever_hooks_keep(before: int, after: int) -> None:
    owner = hooked()
    replica = replica_of(owner)
    assert differences(describe(owner, None), describe(replica, None)) == ()
    for _ in range(2):  # as it is made, and once it has had values
        trained(owner, before)
        accept_hook_state(replica, sent(hook_state(owner)))
        pairs = zip(trained(owner, after), trained(replica, after), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_an_owner_goes_back_in_place() -> None:
    owner = hooked()
    first = next(iter(owner.forward_funcs[0].weight._backward_hooks.values()))
    state = sent(hook_state(owner))
    expected = trained(owner, 2)
    accept_hook_state(owner, state)
    assert next(iter(owner.forward_funcs[0].weight._backward_hooks.values())) is first and not first.norms
    assert all(torch.equal(one, other) for one, other in zip(expected, trained(owner, 2), strict=True))


def test_only_what_moves_is_sent_and_a_replica_that_becomes_owner_sends_it_at_once() -> None:
    owner, moving = Stage(), MovingHooks()
    mask = torch.ones(2, 2)
    owner.forward_funcs[0].weight.register_hook(lambda gradient: gradient * mask)
    owner.forward_funcs[1].weight.register_hook(counting())
    assert not moving.look(owner) and moving.state() is None
    trained(owner, 1)
    assert moving.look(owner) and not moving.look(owner)
    state = moving.state()
    assert state is not None and state["tensors"] is None, "the mask has not changed"
    mask.mul_(2)
    assert moving.look(owner)
    state = moving.state()
    assert state is not None and torch.equal(state["tensors"][0], mask)
    heir = MovingHooks()
    heir.include(state)
    heir.look(owner)
    assert heir.state() is not None


def test_stages_of_one_worker_do_not_share_what_hooks_keep() -> None:
    stages, alone = [Stage(), Stage()], Stage()
    for stage in stages:
        stage.load_state_dict(alone.state_dict())
    hook, its = counting(), Average()
    for stage in stages:
        stage.forward_funcs[0].weight.register_hook(hook)
        stage.forward_funcs[1].weight.register_hook(its)
    alone.forward_funcs[0].weight.register_hook(counting())
    alone.forward_funcs[1].weight.register_hook(Average())
    separate_hooks(stages)
    expected = trained(alone, 2)
    for stage in stages:
        assert all(torch.equal(one, other) for one, other in zip(expected, trained(stage, 2), strict=True))


def test_what_can_not_be_sent_is_named_when_it_changes() -> None:
    owner = Stage()
    owner.forward_funcs[0].weight.register_hook(Locked())
    owner.forward_funcs[1].weight.register_hook(in_a_global)
    before = read_hooks(owner, globals_too=True)
    assert unsendable_changes(before, read_hooks(owner, globals_too=True)) == []
    trained(owner, 1)
    found = unsendable_changes(before, read_hooks(owner, globals_too=True))
    assert found == [
        "hook 0 of 0.weight (holds _thread.lock)",
        f"the global variable SEEN of {__name__}",
    ]
    (problem,) = differences(describe(owner, None), describe(Stage(), None))[:1]
    assert "holding" in problem and "_thread.lock" in problem and "nothing in a replica" in problem


def test_no_class_with_rules_of_its_own_and_no_code_that_is_not_here_is_made() -> None:
    parts = Parts.of(nn.Module())
    nodes = [
        ["object", "pathlib.Path", []],
        ["object", "no.such.Class", []],
        ["function", "os", "system", 1, 1, ["plain", None], []],
        ["named", "os", "system"],
        ["other", "anything"],
    ]
    fitting = Fitting(nodes, [], parts=parts, examples=Examples(), device=CPU)
    for place in range(len(nodes)):
        with pytest.raises(LookupError):
            fitting.root(["ref", place])


def test_what_holds_itself_is_read_and_made() -> None:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    reader = Reader(Parts.of(nn.Module()))
    item = reader.root(ring)
    made = Fitting(reader.graph.nodes, [], parts=Parts.of(nn.Module()), examples=Examples(), device=CPU).root(item)
    assert made[0] == 1 and made[1]["again"] is made
