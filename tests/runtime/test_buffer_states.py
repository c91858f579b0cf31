"""What is kept of a module's buffers before a forward is what they were, whatever torch counts as a change."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.recompute import buffer_state, keep_only_input, restore_buffers
from deepspeed_bamboo.runtime.stock.buffers import accept_buffers, marks_of, moved_since
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class Masked(nn.Module):
    """Batch norm, whose statistics a kernel changes uncounted, and a large constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(300)
        self.register_buffer("mask", torch.ones(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ (x.detach().mean() * self.mask)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 300, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_each_state_has_the_statistics_of_its_own_moment() -> None:
    module = Masked()
    states, means = [], []
    for step in range(3):
        states.append(buffer_state(module, previous=states[-1] if states else None))
        means.append(module.norm.running_mean.clone())
        module(inputs(step))
    assert not torch.equal(means[1], means[2])
    for state, mean in zip(states, means, strict=True):
        restore_buffers(state, module)
        assert torch.equal(module.norm.running_mean, mean)
    masks = [dict(zip([name for name, _ in module.named_buffers()], state.values, strict=True))["mask"]
             for state in states]  # fmt: skip
    assert masks[0] is masks[1] is masks[2]


def test_graphs_of_other_micro_batches_survive_that_buffers_are_restored() -> None:
    module = Masked()
    before = buffer_state(module, previous=None)
    in_flight = module(inputs(0))
    now = buffer_state(module, previous=before)
    restore_buffers(before, module)
    module(inputs(1)).sum().backward()
    restore_buffers(now, module)
    in_flight.sum().backward()
    assert torch.equal(module.norm.running_mean, dict(zip(dict(module.named_buffers()), now.values, strict=True))[
        "norm.running_mean"])  # fmt: skip


def test_a_large_buffer_that_changed_is_copied_and_brought_back() -> None:
    module = Masked()
    before = buffer_state(module, previous=None)
    module.mask.mul_(2)
    after = buffer_state(module, previous=before)
    restore_buffers(before, module)
    assert module.mask.max() == 1
    restore_buffers(after, module)
    assert module.mask.min() == 2


class Scaled(nn.Module):
    """Saves a tensor for its backward, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(16))
        self.saved: weakref.ref[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = x.exp()
        self.saved = weakref.ref(between)
        return between * self.factor


class Energy(nn.Module):
    """Goes down the gradient of a function of its input, inside its forward."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.factor, self.functional = nn.Parameter(torch.ones(16)), functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.functional:
            return x - torch.func.grad(lambda inputs: (inputs.exp() * self.factor).sum())(x)
        with torch.enable_grad():
            inputs = x.detach().requires_grad_()
            energy = (inputs.exp() * self.factor).sum()
            (slope,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return x - slope


@pytest.mark.parametrize("functional", [False, True])
def test_layers_that_take_gradients_in_their_forward_can_keep_only_their_input(functional: bool) -> None:
    layer = Energy(functional=functional)
    replica = StageReplica(Coordinate(0, 0), {"module": layer}, [])
    x, results = torch.rand(3, 16), []
    keep_only_input(replica, 0, lambda: results.append(layer(x)))
    assert torch.equal(results[0], layer(x)) and 0 in replica.without_graph


@pytest.mark.parametrize(
    "layer", [nn.LSTM(16, 16), nn.GRU(16, 16), nn.MultiheadAttention(16, 2, batch_first=True), Scaled()], ids=type
)
def test_a_forward_that_keeps_only_its_input_has_the_last_bits_of_the_owners(layer: nn.Module) -> None:
    """Some kernels give others where no gradient is asked for."""
    replica = StageReplica(Coordinate(0, 0), {"module": layer}, [])
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    arguments = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    results = []

    def forward() -> None:
        results.append(layer(*arguments))

    forward()
    keep_only_input(replica, 0, forward)
    owner, shadow = (result if isinstance(result, torch.Tensor) else result[0] for result in results)
    assert torch.equal(owner, shadow) and 0 in replica.without_graph
    with pytest.raises(RuntimeError, match="kept only its input"):
        shadow.sum().backward()
    if isinstance(layer, Scaled):
        results.clear()
        del owner, shadow
        keep_only_input(replica, 1, forward)
        assert layer.saved is not None and layer.saved() is None, "an intermediate result is kept"


def test_buffers_that_have_moved_are_those_changed_made_or_replaced() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("kept", torch.zeros(2))
    module.register_buffer("replaced", torch.zeros(2))
    marks = marks_of(module)
    assert moved_since(module, marks) == {}
    module.num_batches_tracked.add_(1)
    module.replaced = torch.ones(2)
    module.register_buffer("made", torch.ones(3), persistent=False)
    moved = moved_since(module, marks)
    assert moved.keys() == {("num_batches_tracked", True), ("replaced", True), ("made", False)}
    other = torch.nn.BatchNorm1d(2)
    other.register_buffer("replaced", torch.zeros(2))
    accept_buffers(other, moved)
    assert int(other.num_batches_tracked) == 1 and torch.equal(other.made, torch.ones(3))
    assert "made" not in other.state_dict() and torch.equal(other.replaced, torch.ones(2))
