"""Adds a micro-batch's bf16 gradients to the fp32 ones in one call, with half the kernels of DeepSpeed's loop.

Stock converts each gradient to fp32, adds the result, keeps the bf16 one, sets it to zero before the next
backward and lets autograd add to that zero. Here it is added as it is and dropped, so autograd just leaves the
next one. The sums are the same to the last bit: the conversion is exact either way, and adding to a zero changes
nothing but the sign of a zero, which the fp32 sum (never -0, since it starts at +0) doesn't show.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


class GradientUpdates:
    """The updates of one worker that have yet to be done.

    They wait until the input gradient has been sent, for which the previous stage waits, and until what they were
    computed from was seen to be valid.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._grouped: weakref.WeakSet[Any] = weakref.WeakSet()

    def covers(self, optimizer: Any) -> bool:
        """True where a backward's gradients stay apart from the sums until :meth:`flush`."""
        return optimizer in self._grouped

    def drop(self, module: torch.nn.Module) -> None:
        """Forget what waits: the gradients of one backward of ``module``, whose input never arrived."""
        self._waiting.clear()
        for parameter in module.parameters():
            parameter.grad = None

    def group(self, optimizer: Any) -> None:
        """Replace ``optimizer``'s update by a grouped, postponed one; other classes of optimizers stay as they are."""
        if type(optimizer) is not BF16_Optimizer or optimizer.immediate_grad_update:
            return
        if getattr(optimizer, "autoep_folding_tp_group", None) is not None:
            return
        groups = [
            _Group(parameters, sums, optimizer, index)
            for index, (parameters, sums) in enumerate(
                zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            )
        ]

        def update_hp_grads(clear_lp_grads: bool = False) -> None:
            self._waiting.extend(group.add for group in groups)

        optimizer.update_hp_grads = update_hp_grads
        self._grouped.add(optimizer)

    def flush(self) -> None:
        """Do what waits. Called before anything reads gradients, and before the next backward."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for update in waiting:
                update()


class _Group:
    """One parameter group of the optimizer."""

    def __init__(self, parameters: list[Any], sums: list[torch.Tensor], optimizer: Any, index: int) -> None:
        self._parameters = list(parameters)
        self._sums = [total.view(parameter.shape) for parameter, total in zip(parameters, sums, strict=True)]
        self._flat = list(sums)
        self._optimizer = optimizer
        self._index = index

    @torch.no_grad()
    def add(self) -> None:
        flags = self._optimizer.fp32_groups_has_gradients[self._index]
        sums: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for position, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if not flags[position]:
                flags[position] = True
                parameter._hp_grad = self._flat[position]
            sums.append(self._sums[position])
            gradients.append(gradient)
        if sums:
            torch._foreach_add_(sums, gradients)
