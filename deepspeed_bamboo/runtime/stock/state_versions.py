"""What shows, without a look at numbers, that a script has changed a stage: versions of tensors, and plain values."""

from __future__ import annotations

import torch

from deepspeed_bamboo.runtime.stock.gradients import masters_of
from deepspeed_bamboo.runtime.stock.replica import StageReplica


def versions_of(replica: StageReplica) -> tuple[int, str]:
    """Another value once the script has changed weights, buffers, optimizer state or schedule.

    How gradients are clipped and the loss scaled is none of that: shadows get it with each step.
    """
    tensors = (*replica.module.parameters(), *replica.module.buffers())
    return sum(tensor._version for tensor in tensors), beside_weights(replica)


def touched(replica: StageReplica) -> tuple[int, str]:
    """Another value once the script has changed weights or optimizer state; buffers may be changed by forwards."""
    return weights(replica), optimizer_state(replica)


def weights(replica: StageReplica) -> int:
    """Another value once they have been changed."""
    return sum(parameter._version for parameter in replica.module.parameters())


def beside_weights(replica: StageReplica) -> str:
    """The scheduler's state, and what the optimizer keeps."""
    return f"{_schedule(replica)} {optimizer_state(replica)}"


def optimizer_state(replica: StageReplica) -> str:
    """Which tensors with which values the optimizer's state is, and its masters."""
    optimizer = replica.attributes["basic_optimizer"]
    masters = masters_of(replica.attributes["optimizer"])
    kept = {} if optimizer is None else optimizer.state
    states = (its for its in kept.values() if isinstance(its, dict))
    tensors = [value for its in states for value in its.values() if isinstance(value, torch.Tensor)] + masters
    return f"{sum(map(id, tensors))} {sum(tensor._version for tensor in tensors)}"


def _schedule(replica: StageReplica) -> str:
    """The state of the stage's scheduler, which a script may set back or step."""
    scheduler = replica.attributes["lr_scheduler"]
    return repr(None if scheduler is None else scheduler.state_dict())
