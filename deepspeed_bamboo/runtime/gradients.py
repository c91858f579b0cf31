"""Where each DeepSpeed optimizer keeps the gradients that its step will use, and its master weights."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.errors import ConfigError


def parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trainable parameters of a stage, each once, in layer order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@singledispatch
def gradient_tensors(optimizer: Any, module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that hold the accumulated gradients of a stage: what is reduced, mirrored and stepped with.

    Missing gradients are created as zeros, which is what stock does before it reduces.
    """
    result = []
    for parameter in parameters(module):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        result.append(parameter.grad)
    return result


@gradient_tensors.register
def _(optimizer: BF16_Optimizer, module: torch.nn.Module) -> list[torch.Tensor]:
    return list(optimizer.fp32_groups_gradients_flat)


@singledispatch
def clear_gradients(optimizer: Any, module: torch.nn.Module) -> None:
    """Forget everything accumulated so far, as at the start of an iteration."""
    for parameter in module.parameters():
        parameter.grad = None


@clear_gradients.register
def _(optimizer: BF16_Optimizer, module: torch.nn.Module) -> None:
    optimizer.clear_hp_grads()
    optimizer.clear_lp_grads()
    for parameter in module.parameters():
        parameter.grad = None


@singledispatch
def gradient_flags(optimizer: Any) -> Any:
    """Which parameters the optimizer believes to have a gradient, if it keeps track of that; plain data."""
    return None


@gradient_flags.register
def _(optimizer: BF16_Optimizer) -> Any:
    return [list(flags) for flags in optimizer.fp32_groups_has_gradients]


@singledispatch
def accept_gradients(optimizer: Any, module: torch.nn.Module, values: list[torch.Tensor], flags: Any) -> None:
    """Put mirrored gradients, and the owner's :func:`gradient_flags`, where the step will look for them."""
    for target, value in zip(gradient_tensors(optimizer, module), values, strict=True):
        target.copy_(value.view_as(target))


@accept_gradients.register
def _(optimizer: BF16_Optimizer, module: torch.nn.Module, values: list[torch.Tensor], flags: Any) -> None:
    for target, value in zip(optimizer.fp32_groups_gradients_flat, values, strict=True):
        target.copy_(value.view_as(target))
    optimizer.fp32_groups_has_gradients = [list(group) for group in flags]


@singledispatch
def master_weights(optimizer: Any) -> list[torch.Tensor]:
    """Higher-precision copies of the parameters that the optimizer keeps, if it does."""
    return []


@master_weights.register
def _(optimizer: BF16_Optimizer) -> list[torch.Tensor]:
    return [partition.data for partition in optimizer.fp32_groups_flat_partition]


def require_supported(optimizer: Any) -> None:
    """Raise ConfigError for an optimizer class whose state the plugin cannot keep a replica of."""
    if not isinstance(optimizer, (torch.optim.Optimizer, BF16_Optimizer)):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} is not supported with redundancy yet; supported are plain torch "
            "optimizers (fp32) and DeepSpeed's BF16 optimizer. Set bamboo.redundancy.mode to \"off\", or train in "
            "fp32 or bf16 without ZeRO."
        )

