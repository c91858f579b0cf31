"""A job's profile from a table of step times, so that core's plans can time grids that are not in the table.

A step of D pipelines of P stages is taken to be what synchronous 1F1B takes (PipeDream-Flush, Narayanan et al. 2021):
(M + P - 1) passes of the largest stage, M = B / (D m) micro-batches of m samples, then reducing gradients across the
pipelines, then a constant. Work and constant are fitted by least squares. The table can't tell bubbles from the
constant; m is the largest that divides a pipeline's batch and needs no negative constant, so that as much as possible
of what isn't work is bubbles; 1 and no constant if there is none. That is an assumption, and
`model.micro_batch_samples` replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .cost import JobProfile, LayerCost, reduce_seconds
from .steptimes import Grid

__all__ = ["TableModel", "fitted_profile"]

_BACKWARD_SHARE = 2.0 / 3.0


@dataclass(frozen=True)
class TableModel:
    """What a table's model is, besides its step times.

    Attributes:
        name: for messages.
        samples_per_step: the global batch.
        layers: what stages are made of; 0: any cut is even.
        parameters: of the whole model.
        state_bytes_per_parameter: of a replica.
        overhead: what eager FRC adds to every time in the table.
        micro_batch_samples: None: fitted.
        link_bytes_per_second: between machines, one way.
        gradient_bytes_per_parameter: as gradients are reduced.
    """

    name: str
    samples_per_step: int
    layers: int
    parameters: int
    state_bytes_per_parameter: int
    overhead: float
    micro_batch_samples: int | None = None
    link_bytes_per_second: float = 1.25e9
    gradient_bytes_per_parameter: int = 2


def fitted_profile(model: TableModel, seconds: Mapping[Grid, float], *, own: Grid) -> JobProfile | None:
    """The profile whose steps are nearest to a table's.

    Args:
        model: what is trained.
        seconds: step times by grid, with eager FRC.
        own: the grid that it is for; with as many layers as stages, if the model doesn't say how many it has.

    Returns:
        None if the table says nothing about work: a single row, or steps that take no less with more workers; or if
        the batch can't be shared by the own grid's pipelines.
    """
    layers = model.layers or max(own.stages, *(grid.stages for grid in seconds))
    if len({grid.size for grid in seconds}) < 2 or layers < max(grid.stages for grid in (*seconds, own)):
        return None
    sizes = [model.micro_batch_samples] if model.micro_batch_samples else _divisors(model.samples_per_step, own)
    for size in sizes:
        work, constant = _fit(model, seconds, layers=layers, micro_batch=size)
        if work > 0.0 and constant >= 0.0:
            return _profile(model, layers=layers, micro_batch=size, work=work, constant=constant)
    if not sizes:
        return None
    work, _ = _fit(model, seconds, layers=layers, micro_batch=sizes[-1], constant=False)
    return _profile(model, layers=layers, micro_batch=sizes[-1], work=work, constant=0.0) if work > 0.0 else None


def _divisors(samples: int, grid: Grid) -> list[int]:
    """Samples of a micro-batch with which the grid starts, the most first."""
    each, rest = divmod(samples, grid.pipelines)
    return [] if rest else [one for one in range(each, 0, -1) if each % one == 0]


def _fit(
    model: TableModel, seconds: Mapping[Grid, float], *, layers: int, micro_batch: int, constant: bool = True
) -> tuple[float, float]:
    """Seconds of a sample through all layers, and of each step's constant."""
    points = []
    for grid, taken in seconds.items():
        share = math.ceil(layers / grid.stages) / layers
        samples = model.samples_per_step / grid.pipelines + (grid.stages - 1) * micro_batch
        points.append((share * samples, taken / (1.0 + model.overhead) - _reduced(model, grid, share)))
    if not constant:
        return sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 1e-12 * mean_x**2:
        return 0.0, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope, mean_y - slope * mean_x


def _reduced(model: TableModel, grid: Grid, share: float) -> float:
    return reduce_seconds(
        parameters=model.parameters * share,
        pipelines=grid.pipelines,
        gradient_bytes=model.gradient_bytes_per_parameter,
        bytes_per_second=model.link_bytes_per_second,
    )


def _profile(model: TableModel, *, layers: int, micro_batch: int, work: float, constant: float) -> JobProfile:
    each = work * micro_batch / layers
    layer = LayerCost(each * (1.0 - _BACKWARD_SHARE), each * _BACKWARD_SHARE, round(model.parameters / layers), 0)
    return JobProfile(
        name=model.name,
        layers=(layer,) * layers,
        micro_batch_samples=micro_batch,
        link_bytes_per_second=model.link_bytes_per_second,
        gradient_bytes_per_parameter=model.gradient_bytes_per_parameter,
        state_bytes_per_parameter=model.state_bytes_per_parameter,
        fixed_seconds=constant,
    )
