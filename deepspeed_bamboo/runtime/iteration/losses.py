"""Losses of an activity: the last stages sum them as stock does, and the agreement tells everybody."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import torch

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.runtime.iteration.activity import ActivityState
from deepspeed_bamboo.runtime.stock.hosting import StageHost


class LossEngine(Protocol):
    """What losses are read from, and where stock expects the batch's."""

    activity: ActivityState
    device: torch.device
    job_grid: Grid
    num_stages: int
    last_losses: list[Any]
    mean_loss: float
    additional_losses: dict[str, float]
    # Stock's, of the active stage and of the batch.
    total_loss: Any
    total_additional_losses: Any
    dp_group_loss: Any
    agg_additional_losses: Any

    @property
    def host(self) -> StageHost:
        """The stages that this worker holds."""

    def is_last_stage(self) -> bool:
        """Of the active stage."""

    def _scale_loss_by_gas(self, loss: Any) -> Any: ...


def stage_losses(engine: LossEngine) -> dict[Coordinate, Any]:
    """What this worker's last stages contribute to an iteration: mean loss and additional losses."""
    result: dict[Coordinate, Any] = {}
    host = engine.host
    for replica in host.owners():
        host.activate(replica)
        if not engine.is_last_stage():
            continue
        additional = engine.total_additional_losses
        result[replica.coordinate] = (
            to_host(engine._scale_loss_by_gas(engine.total_loss)),
            None
            if additional is None
            else OrderedDict(
                (name, to_host(engine._scale_loss_by_gas(value.clone().detach()))) for name, value in additional.items()
            ),
        )
    return result


def agreed_losses(engine: LossEngine) -> list[Any]:
    """What the last stage of each pipeline contributed to the activity that just ended, in pipeline order."""
    merged: dict[Coordinate, Any] = {}
    for value in engine.activity.previous[0].values():
        merged.update(value.get("losses", {}))
    return [merged[Coordinate(pipeline, engine.num_stages - 1)] for pipeline in range(engine.job_grid.pipelines)]


def aggregate_losses(engine: LossEngine) -> torch.Tensor:
    """The batch's loss, the same on every worker: mean over pipelines, added in pipeline order.

    Also sets the engine's ``dp_group_loss`` and ``agg_additional_losses``, as stock's aggregation does, and
    ``mean_loss`` and ``additional_losses``, the same as plain numbers. Nothing here waits for the device, which is
    still taking its step.
    """
    losses = engine.last_losses
    own_pipeline = engine.host.owners()[0].coordinate.pipeline if engine.host.owners() else 0
    engine.dp_group_loss = losses[own_pipeline][0].to(engine.device, non_blocking=True)
    mean = mean_over_pipelines([loss for loss, _ in losses])
    engine.mean_loss = float(mean.mean())
    additional = [extra for _, extra in losses]
    engine.agg_additional_losses, engine.additional_losses = None, {}
    if additional[0] is not None:
        means = [(name, mean_over_pipelines([extra[name] for extra in additional])) for name in additional[0]]
        engine.additional_losses = {name: float(one.mean()) for name, one in means}
        engine.agg_additional_losses = OrderedDict(
            (name, one.to(engine.device, non_blocking=True)) for name, one in means
        )
    aggregated: torch.Tensor = mean.to(engine.device, non_blocking=True)
    return aggregated


def mean_over_pipelines(values: list[Any]) -> Any:
    """Mean of what the pipelines contributed, in pipeline order; lists element by element."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        return [mean_over_pipelines([value[index] for value in values]) for index in range(len(values[0]))]
    total = values[0].clone()
    for value in values[1:]:
        total += value
    total /= len(values)
    return total


def to_host(value: Any) -> Any:
    """Copies of tensors on the host, inside lists too."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return [to_host(item) for item in value]
    return value
