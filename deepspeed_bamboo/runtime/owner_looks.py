"""What is looked at in a stage to see, at first by numbers, what a script has done to it."""

from __future__ import annotations

from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.recovery.stage_state import checksum
from deepspeed_bamboo.runtime.stock.gradients import master_weights
from deepspeed_bamboo.runtime.stock.hook_values import hook_state
from deepspeed_bamboo.runtime.stock.noted_values import Held
from deepspeed_bamboo.runtime.stock.optimizer_values import unfollowed_hooks
from deepspeed_bamboo.runtime.stock.replica import StageReplica


def tell_of_hooked_steps(worker: Worker) -> None:
    """Before the first step: what the script does in its optimizer's step, shadows don't."""
    optimizers = (replica.attributes["basic_optimizer"] for replica in worker.host.owners())
    hooks = sorted({hook for optimizer in optimizers for hook in unfollowed_hooks(optimizer)})
    if hooks:
        tell_once(
            worker,
            f"the script has hooked or wrapped the optimizer's step ({', '.join(hooks)}), and shadows step without "
            "that: what it changes of weights or state is not there after a loss. If it only looks, all is well; "
            "else put it into step() of an optimizer class of your own",
        )


def checksums(replica: StageReplica) -> tuple[int, int]:
    """Of weights, and of buffers."""
    replica.finish_step()
    masters = master_weights(replica.attributes["optimizer"])
    return checksum([*replica.module.parameters(), *masters]), buffers_checksum(replica)


def buffers_checksum(replica: StageReplica) -> int:
    """Of buffers alone."""
    return checksum(list(replica.module.buffers()))


def held_now(replica: StageReplica) -> Held:
    """What hooks and attributes keep, in the host's memory."""
    attributes = replica.moving_attributes.state(replica.module)
    if attributes is not None:
        attributes = {**attributes, "tensors": [tensor.cpu() for tensor in attributes["tensors"]]}
    return [hook_state(replica.module, host=True), attributes]


def has_gradients(replica: StageReplica) -> bool:
    """Whether one is not zero."""
    gradients = (parameter.grad for parameter in replica.module.parameters())
    return any(bool(gradient.any()) for gradient in gradients if gradient is not None)


def count_gradients(replica: StageReplica) -> int:
    """Another number once a backward has added to a gradient."""
    gradients = (parameter.grad for parameter in replica.module.parameters())
    return sum(gradient._version + 1 for gradient in gradients if gradient is not None)
