"""What is kept of a module's buffers before a forward is what they were, whatever torch counts as a change."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed_bamboo.runtime.iteration.recompute import buffer_state, restore_buffers


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
