"""Where each DeepSpeed optimizer keeps the gradients that its step will use, and its master weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

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
def gradient_bytes(optimizer: Any, module: torch.nn.Module) -> int:
    """What the gradients of a stage take on its device while micro-batches are accumulated, in bytes."""
    return sum(parameter.nbytes for parameter in parameters(module))


@gradient_bytes.register
def _(optimizer: BF16_Optimizer, module: torch.nn.Module) -> int:
    of_one_backward = sum(parameter.nbytes for parameter in parameters(module))
    totals: list[torch.Tensor] = optimizer.fp32_groups_gradients_flat
    return of_one_backward + sum(total.nbytes for total in totals)


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
def remember_gradients(optimizer: Any, module: torch.nn.Module, *, touched: list[torch.Tensor]) -> Callable[[], None]:
    """Before a reduction: what to call to put back the gradients as they are now.

    ``touched`` are the tensors that the reduction will change.
    """
    kept = [(tensor, tensor.clone()) for tensor in touched]

    def put_back() -> None:
        for tensor, value in kept:
            tensor.copy_(value)

    return put_back


@singledispatch
def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """Higher-precision copies of the parameters that the optimizer keeps, if it does: the tensors themselves."""
    return []


@masters_of.register
def _(optimizer: BF16_Optimizer) -> list[torch.Tensor]:
    return list(optimizer.fp32_groups_flat_partition)


@masters_of.register
def _(optimizer: FP16_Optimizer) -> list[torch.Tensor]:
    return list(optimizer.fp32_groups_flat)


@masters_of.register
def _(optimizer: FP16_UnfusedOptimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.fp32_groups for parameter in group]


def master_weights(optimizer: Any) -> list[torch.Tensor]:
    """:func:`masters_of` without autograd, which counts no version of them."""
    return [master.data for master in masters_of(optimizer)]


@singledispatch
def kept_gradients(optimizer: Any) -> list[torch.Tensor]:
    """Gradients that stay after a step, where a later step may apply them again; most optimizers have none."""
    return []


@singledispatch
def loss_scaling(optimizer: Any) -> Any:
    """The object whose plain attributes are the optimizer's loss scale and its history; None without one."""
    return None


@loss_scaling.register(FP16_Optimizer)
@loss_scaling.register(FP16_UnfusedOptimizer)
def _(optimizer: Any) -> Any:
    return optimizer.loss_scale_config


_SCALE_NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OVERRIDING = ("custom_loss_scaler", "external_loss_scale")  # of the optimizer, set by override_loss_scale()


def scale_state(optimizer: Any) -> dict[str, Any]:
    """The loss scale and its history, as plain data; empty without loss scaling."""
    holder = loss_scaling(optimizer)
    if holder is None:
        return {}
    pairs = ((holder, _SCALE_NAMES), (optimizer, _OVERRIDING))
    return {name: vars(its)[name] for its, names in pairs for name in names if name in vars(its)}


def accept_scale_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Inverse of :func:`scale_state`."""
    holder = loss_scaling(optimizer)
    for name, value in state.items():
        setattr(optimizer if name in _OVERRIDING else holder, name, value)


@singledispatch
def is_supported(optimizer: Any) -> bool:
    """True for optimizers whose whole state the plugin can keep a replica of."""
    return isinstance(optimizer, torch.optim.Optimizer)


@is_supported.register(BF16_Optimizer)
@is_supported.register(FP16_Optimizer)
@is_supported.register(FP16_UnfusedOptimizer)
def _(optimizer: Any) -> bool:
    return True


def require_supported(optimizer: Any) -> None:
    """Raise ConfigError for an optimizer class whose state the plugin cannot keep a replica of."""
    if not is_supported(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} is not supported with redundancy; supported are plain torch "
            "optimizers and DeepSpeed's BF16, FP16 and ZeRO stage 1 optimizers without ZenFlow. Choose "
            'one of those, or set "bamboo": {"enabled": false}.'
        )


def require_state(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler, if there is one, whose state can't be had and given to a replica's."""
    names = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))]
    if scheduler is not None and names:
        raise ConfigError(
            f"scheduler {type(scheduler).__name__} has no {' and no '.join(names)}, by which a replica's would be kept "
            "equal. Derive it from torch.optim.lr_scheduler.LRScheduler, add what it lacks, or set "
            '"bamboo": {"enabled": false}.'
        )
