"""Losses of an activity: summed by the last stages as stock does, made known to everybody by the agreement."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_bamboo.core.grid import Coordinate

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def stage_losses(engine: BambooPipelineEngine, *, outputs: bool = False) -> dict[Coordinate, Any]:
    """What this worker's last stages contribute: mean loss and additional losses, or (``outputs``) every forward's."""
    result: dict[Coordinate, Any] = {}
    host = engine.host
    for replica in host.owners():
        host.activate(replica)
        if not engine.is_last_stage():
            continue
        if outputs:
            result[replica.coordinate] = [_to_host(value) for value in engine.fwd_outputs]
            continue
        additional = engine.total_additional_losses
        result[replica.coordinate] = (
            _to_host(engine._scale_loss_by_gas(engine.total_loss)),
            None
            if additional is None
            else OrderedDict(
                (name, _to_host(engine._scale_loss_by_gas(value.clone().detach())))
                for name, value in additional.items()
            ),
        )
    return result


def agreed_losses(engine: BambooPipelineEngine) -> list[Any]:
    """What the last stage of each pipeline contributed to the activity that just ended, in pipeline order."""
    merged: dict[Coordinate, Any] = {}
    for value in engine.activity.previous[0].values():
        merged.update(value.get("losses", {}))
    return [merged[Coordinate(pipeline, engine.num_stages - 1)] for pipeline in range(engine.job_grid.pipelines)]


def aggregate_losses(engine: BambooPipelineEngine) -> torch.Tensor:
    """The batch's loss, the same on every worker: mean over pipelines, added in pipeline order.

    Also sets the engine's ``dp_group_loss`` and ``agg_additional_losses``, as stock's aggregation does.
    """
    losses = engine.last_losses
    own_pipeline = engine.host.owners()[0].coordinate.pipeline if engine.host.owners() else 0
    engine.dp_group_loss = losses[own_pipeline][0].to(engine.device)
    mean = _mean([loss for loss, _ in losses])
    additional = [extra for _, extra in losses]
    engine.agg_additional_losses = None
    if additional[0] is not None:
        engine.agg_additional_losses = OrderedDict(
            (name, _mean([extra[name] for extra in additional]).to(engine.device)) for name in additional[0]
        )
    return mean.to(engine.device)


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values) if len(values) > 1 else total


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return torch.stack([item.detach().to("cpu") for item in value])
    return value
