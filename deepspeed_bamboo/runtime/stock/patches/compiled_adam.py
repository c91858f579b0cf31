"""DeepSpeed's compiled Adams on a CPU, made to depend on nothing but their arguments.

FusedAdam keeps the powers of its betas in one object for the whole process, DeepSpeedCPUAdam (with offload_optimizer)
in one for each optimizer: continued by a product from step to step, or computed again after a gap. So the last bits of
a step depend on what was stepped before, and a replica that was rebuilt after a loss would differ from its owner. The
kernel for GPUs keeps nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam


def make_independent_of_history(optimizer: Any) -> None:
    """Make every step of ``optimizer`` compute the powers of its betas again, if it is a compiled Adam on a CPU."""
    if isinstance(optimizer, DeepSpeedCPUAdam):
        optimizer.ds_opt_adam = _WithPowersAnew(optimizer.ds_opt_adam)
        return
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


class _WithPowersAnew:
    """DeepSpeedCPUAdam's compiled part; before each update one without effect, with other betas."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._nothing = [torch.zeros(1) for _ in range(4)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def adam_update(self, number: int, step: int, lr: float, *further: Any) -> Any:
        """As DeepSpeed's: betas, epsilon, weight decay, whether bias is corrected, and four tensors follow."""
        epsilon, _, corrects_bias = further[2:5]
        self._compiled.adam_update(number, 1, 0.0, 0.0, 0.0, epsilon, 0.0, corrects_bias, *self._nothing)
        return self._compiled.adam_update(number, step, lr, *further)
