"""DeepSpeed's ZeRO optimizer at stage 1: each pipeline keeps the optimizer state of its own partition of a stage.

The shadow of ``(d, p)`` replicates that partition, and steps with the same logical groups. Importing this
module registers it with the functions of :mod:`gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_bamboo.runtime.stock import gradients, zero_offload


@gradients.gradient_tensors.register
def _(optimizer: DeepSpeedZeroOptimizer, module: torch.nn.Module) -> list[torch.Tensor]:
    """After the reduction: the gradients of this partition, padding included."""
    if optimizer.cpu_offload:
        return [*zero_offload.host_gradients(optimizer), *zero_offload.norms(optimizer)]
    reduced = optimizer.averaged_gradients
    return [tensor for group in sorted(reduced) for tensor in reduced[group] or ()]


@gradients.gradient_flags.register
def _(optimizer: DeepSpeedZeroOptimizer) -> Any:
    """Per group, which of its tensors are padding (stock leaves those out of the norm)."""
    if optimizer.cpu_offload:
        return zero_offload.flags(optimizer)
    return [
        [bool(getattr(tensor, "_zero_padding", False)) for tensor in optimizer.averaged_gradients[group]]
        for group in sorted(optimizer.averaged_gradients)
    ]


@gradients.accept_gradients.register
def _(optimizer: DeepSpeedZeroOptimizer, module: torch.nn.Module, values: list[torch.Tensor], flags: Any) -> None:
    _reset(optimizer)
    if optimizer.cpu_offload:
        zero_offload.accept(optimizer, values, flags)
        return
    remaining = iter(values)
    for group, paddings in enumerate(flags):
        optimizer.averaged_gradients[group] = []
        for is_padding in paddings:
            value = next(remaining).clone()
            if is_padding:
                value._zero_padding = True  # type: ignore[attr-defined]
            optimizer.averaged_gradients[group].append(value)
        optimizer.all_grad_tensors[group] = None


@gradients.clear_gradients.register
def _(optimizer: DeepSpeedZeroOptimizer, module: torch.nn.Module) -> None:
    _reset(optimizer)
    optimizer.zero_grad()
    for parameter in module.parameters():
        parameter.grad = None


@gradients.remember_gradients.register
def _(optimizer: DeepSpeedZeroOptimizer, module: torch.nn.Module, *, touched: list[torch.Tensor]) -> Callable[[], None]:
    """Stock moves gradients into its buckets and drops them from the parameters, so all of them are kept."""
    kept = [
        (parameter, _copy(parameter.grad), _copy(getattr(parameter, "grad_accum", None)))
        for group in optimizer.bit16_groups
        for parameter in group
    ]

    def put_back() -> None:
        _reset(optimizer)
        for parameter, gradient, accumulated in kept:
            parameter.grad = gradient
            parameter.grad_accum = accumulated

    return put_back


@gradients.masters_of.register
def _(optimizer: DeepSpeedZeroOptimizer) -> list[torch.Tensor]:
    return list(optimizer.single_partition_of_fp32_groups)


@gradients.kept_gradients.register
def _(optimizer: DeepSpeedZeroOptimizer) -> list[torch.Tensor]:
    return zero_offload.host_gradients(optimizer) if optimizer.cpu_offload else []


@gradients.loss_scaling.register
def _(optimizer: DeepSpeedZeroOptimizer) -> Any:
    return optimizer.loss_scaler


@gradients.is_supported.register
def _(optimizer: DeepSpeedZeroOptimizer) -> bool:
    return not (optimizer.zenflow or optimizer.partition_gradients or optimizer.has_moe_layers)


def _reset(optimizer: DeepSpeedZeroOptimizer) -> None:
    """As if no reduction had begun, which one that was interrupted halfway is not."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
        bucket.buffer.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced[:] = [False] * len(optimizer.params_already_reduced)
    optimizer.averaged_gradients.clear()
    optimizer.all_grad_tensors.clear()
    if optimizer.cpu_offload:
        zero_offload.reset(optimizer)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
