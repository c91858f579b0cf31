"""What is looked at in a stage to see, at first by numbers, what a script has done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.replica_differences import strayed
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.membership.starting import refuse_unlike
from deepspeed_bamboo.runtime.recovery.stage_state import checksum
from deepspeed_bamboo.runtime.stock.gradients import master_weights
from deepspeed_bamboo.runtime.stock.hook_values import hook_state
from deepspeed_bamboo.runtime.stock.noted_values import Held
from deepspeed_bamboo.runtime.stock.optimizer_values import unfollowed_hooks
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.state_versions import beside_weights

Known = Mapping[Coordinate, tuple[str, int, int, str]]
"""What :func:`look_at` returns, by stage."""


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


def look_at(worker: Worker, replica: StageReplica) -> tuple[str, int, int, str]:
    """How ``replica`` is made, checksums of its weights and of its buffers, and what it has beside them."""
    replica.finish_step()
    return described(worker, replica), *checksums(replica), beside_weights(replica)


def described(worker: Worker, replica: StageReplica) -> str:
    """How ``replica`` is made, as a text to compare."""
    its = {**worker.host.description(replica), "held": None}
    for module in its["modules"].values():
        # A forward may change them (a counter, a cache); hooks and structure it does not.
        module.pop("attributes")
    return repr(its)


def states_after_step(worker: Worker, known: Known) -> dict[str, dict[str, list[int]]]:
    """Checksums of weights and buffers after the last step: of owners, from ``known``, and of shadows."""
    shadows = {str(c): list(checksums(replica)) for c, replica in worker.host.shadows.items() if replica.complete}
    return {"owned": {str(c): list(its[1:3]) for c, its in known.items()}, "shadows": shadows}


def refuse_strayed(worker: Worker, states: Sequence[Mapping[str, Mapping[str, list[int]]]]) -> None:
    """Raise ConfigError, the same on all workers, where a shadow has taken another step than its owner.

    ``states``: what :func:`states_after_step` has returned on each of them.
    """
    found = strayed(states)
    problem = (
        f"{', '.join(found)} differ after a step that owner and shadow took with the same gradients (the script "
        "has wrapped or replaced step(), an optimizer or a layer keeps something outside its state_dict(), or "
        "computing depends on more than its inputs)"
    )
    refuse_unlike(worker, [problem] if found else [])


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
