"""ZeRO-1 with the optimizer on the host: where stock keeps reduced gradients there, and what its norm is made of.

The reduction copies this partition's gradients to the host, into the ``grad`` of each master weight, and notes each
parameter's norm as it was on the device. A gradient on the host stays there after the step. Where a later step has none
for a parameter, stock applies what is there, so it is part of a stage's state.
"""

from __future__ import annotations

from typing import Any

import torch

_BEFORE_ANY = -1


def host_gradients(optimizer: Any) -> list[torch.Tensor]:
    """What the step of ``optimizer`` applies, by group, padding included; on the host, and valid on return."""
    optimizer._wait_for_offload_copies()
    gradients: list[torch.Tensor] = [partition.grad for partition in optimizer.single_partition_of_fp32_groups]
    return gradients


def norms(optimizer: Any) -> list[torch.Tensor]:
    """The norms in one tensor, by the numbers of their parameters (:func:`flags`); nothing where there are none."""
    noted = [optimizer.norm_for_param_grads[number] for number in _numbers(optimizer)]
    return [torch.stack(noted)] if noted else []


def flags(optimizer: Any) -> Any:
    """Which parameters have a norm, and whether a gradient of this partition has overflowed; plain data."""
    return {"norms": _numbers(optimizer), "overflow": bool(optimizer.local_overflow)}


def accept(optimizer: Any, values: list[torch.Tensor], flags: Any) -> None:
    """Put :func:`host_gradients` and :func:`norms` of another replica where the step will look for them."""
    numbers = flags["norms"]
    targets = host_gradients(optimizer)
    noted = values[-1].unbind() if numbers else ()
    with torch.no_grad():
        for target, value in zip(targets, values[:-1] if numbers else values, strict=True):
            target.copy_(value)
    optimizer.norm_for_param_grads = dict(zip(numbers, noted, strict=True))
    optimizer.local_overflow = flags["overflow"]


def reset(optimizer: Any) -> None:
    """As if no backward had been and no reduction had begun: nothing noted, nothing added up on the host."""
    optimizer._wait_for_offload_copies()
    optimizer.norm_for_param_grads = {}
    optimizer.local_overflow = False
    optimizer.accumulated_grads_in_cpu.clear()
    optimizer._offload_accumulated_param_ids.clear()
    optimizer.micro_step_id = _BEFORE_ANY


def _numbers(optimizer: Any) -> list[int]:
    return sorted(optimizer.norm_for_param_grads)
