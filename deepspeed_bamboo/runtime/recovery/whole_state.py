"""Collects the whole model's weights on one worker."""

from __future__ import annotations

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.script_ranks import reporter
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.script_hooks import LOSS

_KIND = "whole state"


def collect_whole_state(worker: Worker) -> dict[str, torch.Tensor]:
    """The weights and buffers of the first pipeline on the reporter, nothing elsewhere; collective, survives losses."""
    while True:
        found: dict[str, torch.Tensor] = {}

        def collect(found: dict[str, torch.Tensor] = found) -> bool:
            found.clear()
            found.update(_collect_once(worker))
            return bool(found)

        worker.agree_on(_KIND, collect)
        # The reporter may have been lost at the very end, and the next one has not collected anything.
        if any(worker.agree_on(_KIND, lambda has=bool(found): has).values()):  # type: ignore[misc]
            return found


def _collect_once(worker: Worker) -> dict[str, torch.Tensor]:
    record, me = worker.record, worker.me
    target = reporter(record.placement)
    label = f"{worker.activity.index}/{_KIND}"
    result: dict[str, torch.Tensor] = {}
    for stage in range(worker.grid.stages):
        coordinate = Coordinate(0, stage)
        owner = record.placement.owner(coordinate)
        if owner == me:
            state = _state_of(worker.host.owned[coordinate])
            if target == me:
                add_stage(result, state)
            else:
                worker.links.send(target, Message(f"{label}/{stage}", list(state), list(state.values())))
        elif target == me:
            message = worker.links.receive(owner, f"{label}/{stage}")
            add_stage(result, dict(zip(message.data, message.tensors, strict=True)))
    return result


def add_stage(result: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """What tied layers have beside the tied weight counts as the first stage has it, as in DeepSpeed's own files."""
    for name, tensor in state.items():
        if name.startswith(f"{LOSS}."):
            result[name] = tensor  # only the last stage trains it
        else:
            result.setdefault(name, tensor)


def _state_of(replica: StageReplica) -> dict[str, torch.Tensor]:
    replica.finish_step()
    tensors = (*replica.module.named_parameters(), *replica.module.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
