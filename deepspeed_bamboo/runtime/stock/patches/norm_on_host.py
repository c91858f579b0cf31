"""Lets stock's BF16 optimizer judge the agreed norm of all gradients on the host.

The norm arrives on the host anyway. Stock looks at it on the device, which takes some twenty launches and four reads,
one after the other, between the agreement and the update: 1.5 ms in which all devices wait. Stock computes where the
norm is, so it is enough to leave it where it arrived. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.runtime.stock.replica import StageReplica


def asks_for_the_norm(replica: StageReplica) -> bool:
    """True where the norm that counts comes from the owners: a pipeline of one stage has nobody to ask."""
    optimizer = replica.attributes["optimizer"]
    stages = replica.attributes["grid"].pipe_parallel_size
    return type(optimizer) is BF16_Optimizer and not optimizer.has_moe_layers and stages > 1


def judge_norm_on_host(replica: StageReplica) -> None:
    """From now on the steps of ``replica`` do so, where there is a norm to ask for; else nothing changes."""
    if not asks_for_the_norm(replica):
        return
    optimizer = replica.attributes["optimizer"]
    replica.attributes["grid"].ds_model_proc_group.answers_on_host = True
    optimizer.get_grads_for_norm = _Norms(optimizer, optimizer.get_grads_for_norm)


@contextmanager
def without_norm(optimizer: BF16_Optimizer) -> Iterator[None]:
    """In the block a step contributes one number instead of its gradients' norm: for a shadow, whose doesn't count."""
    whole = optimizer.get_grads_for_norm

    def one_number(for_clipping: bool = False) -> Any:
        first = optimizer.fp32_groups_gradients_flat[0][:1]
        return whole(for_clipping=True) if for_clipping else (_Gradients([first]), {})

    optimizer.get_grads_for_norm = one_number
    try:
        yield
    finally:
        optimizer.get_grads_for_norm = whole


class _Norms:
    """Takes the place of an optimizer's ``get_grads_for_norm``."""

    def __init__(self, optimizer: BF16_Optimizer, stock: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._stock = stock

    def __call__(self, for_clipping: bool = False) -> Any:
        if for_clipping:
            # Of what has no gradient the sum is zero, and stays so.
            return [_Clipped(flat) for flat in self._optimizer.fp32_groups_gradients_flat]
        gradients, of_experts = self._stock()
        # A stage whose parameters are all tied to an earlier stage's has none to count: stock fails there.
        return _Gradients(gradients or [torch.zeros(1)]), of_experts


class _Gradients(list[torch.Tensor]):
    """What stock computes the norm of. It brings the norm to where the first of them is, and that is the host."""

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return torch.zeros(()) if index == 0 else super().__getitem__(index)


class _Clipped:
    """Gradients to be multiplied by a number on the host; rounded as if that were on the device."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = gradients

    def detach(self) -> _Clipped:
        return self

    def mul_(self, factor: torch.Tensor) -> _Clipped:
        self._gradients.mul_(factor.to(self._gradients.device, non_blocking=True))
        return self
