"""The whole model's weights on one worker, from all who host stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.script_ranks import reporter
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.stock.replica import StageReplica

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

_KIND = "whole state"


def collect_whole_state(engine: BambooPipelineEngine) -> dict[str, torch.Tensor]:
    """The weights and buffers of the first pipeline on the reporter, nothing elsewhere; collective, survives losses."""
    while True:
        found: dict[str, torch.Tensor] = {}

        def collect(found: dict[str, torch.Tensor] = found) -> bool:
            found.clear()
            found.update(_collect_once(engine))
            return bool(found)

        engine.agree_on(_KIND, collect)
        # The reporter may have been lost at the very end, and the next one has not collected anything.
        if any(engine.agree_on(_KIND, lambda has=bool(found): has).values()):  # type: ignore[misc]
            return found


def _collect_once(engine: BambooPipelineEngine) -> dict[str, torch.Tensor]:
    record = engine.session.interruption.active
    if record is None:
        raise RuntimeError("no epoch has been entered")
    me, target = engine.session.worker, reporter(record.placement)
    label = f"{engine.activity.index}/{_KIND}"
    result: dict[str, torch.Tensor] = {}
    for stage in range(engine.job_grid.stages):
        coordinate = Coordinate(0, stage)
        owner = record.placement.owner(coordinate)
        if owner == me:
            state = _state_of(engine.host.owned[coordinate])
            if target == me:
                result.update(state)
            else:
                engine.links.send(target, Message(f"{label}/{stage}", list(state), list(state.values())))
        elif target == me:
            message = engine.links.receive(owner, f"{label}/{stage}")
            result.update(zip(message.data, message.tensors, strict=True))
    return result


def _state_of(replica: StageReplica) -> dict[str, torch.Tensor]:
    replica.settle()
    tensors = (*replica.module.named_parameters(), *replica.module.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
