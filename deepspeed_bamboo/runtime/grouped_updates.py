"""Adds a micro-batch's bf16 gradients to the fp32 ones in one call, with half the kernels of DeepSpeed's loop.

Stock converts each gradient to fp32, adds the result, keeps the bf16 one, sets it to zero before the next
backward and lets autograd add to that zero. Here it is added as it is and dropped, so autograd just leaves the
next one. The sums are the same to the last bit: the conversion is exact either way, and adding to a zero changes
nothing but the sign of a zero, which the fp32 sum (never -0, since it starts at +0) doesn't show.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


def group_gradient_updates(optimizer: Any) -> None:
    """Replace ``optimizer``'s per-parameter update by a grouped one; other optimizers stay as they are."""
    if type(optimizer) is not BF16_Optimizer or optimizer.immediate_grad_update:
        return
    if getattr(optimizer, "autoep_folding_tp_group", None) is not None:
        return

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        sums: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for index, group in enumerate(optimizer.bf16_groups):
            high, has_gradient = optimizer.fp32_groups_gradients[index], optimizer.fp32_groups_has_gradients[index]
            for position, parameter in enumerate(group):
                if parameter.grad is None:
                    continue
                parameter._hp_grad = high[position]
                has_gradient[position] = True
                sums.append(high[position])
                gradients.append(parameter.grad.view(high[position].shape))
                parameter.grad = None
        if sums:
            torch._foreach_add_(sums, gradients)

    optimizer.update_hp_grads = update_hp_grads
