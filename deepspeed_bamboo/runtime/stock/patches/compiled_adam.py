"""DeepSpeed's compiled Adam on a CPU, made to depend on nothing but its arguments.

It keeps the powers of its betas in one object for the whole process: continued by a product from step to step, or
computed again after a gap. So the last bits of a step depend on what else the process has stepped before, and a
replica that was rebuilt after a loss would differ from its owner. The kernel for GPUs keeps nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam


def make_independent_of_history(optimizer: Any) -> None:
    """Make every step of ``optimizer`` compute the powers of its betas again, if it is a compiled Adam on a CPU."""
    if not isinstance(optimizer, FusedAdam):
        return
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        return
    compiled = optimizer.multi_tensor_adam
    nothing = [[torch.zeros(1)] for _ in range(4)]  # gradient, parameter and moments of a step without effect

    def step(chunk_size: int, overflow: Any, tensors: Any, lr: float, *betas_and_further: Any) -> Any:
        epsilon, _, mode = betas_and_further[2:5]
        compiled(chunk_size, overflow, nothing, lr, 0.0, 0.0, epsilon, 1, mode, 0, 0.0)
        return compiled(chunk_size, overflow, tensors, lr, *betas_and_further)

    optimizer.multi_tensor_adam = step
