"""How long a step takes: from a table of measured grids, or from the cost model."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from .cost import JobProfile, hosted_step_seconds, redundant_forward_overhead, total_work_seconds
from .errors import MissingStepTimeError, ScenarioError

__all__ = ["Grid", "ProfiledSteps", "StepTable", "StepTimes", "WithoutRedundancy"]


class Grid(NamedTuple):
    """Pipelines times stages: the D x P grid of coordinates."""

    pipelines: int
    stages: int

    @property
    def size(self) -> int:
        """Coordinates, and workers when each hosts one."""
        return self.pipelines * self.stages


class StepTimes(Protocol):
    """What the policies ask about a model. All times include eager FRC, as the published tables do."""

    def grid_seconds(self, grid: Grid) -> float:
        """A step on a grid that is known, one worker a coordinate; raises MissingStepTimeError if it isn't."""
        ...

    def hosted_seconds(self, grid: Grid, *, most_hosted: int) -> float:
        """A step on any grid, estimated, when the most loaded worker hosts so many of its coordinates."""
        ...

    def fastest_seconds(self, machines: int) -> float:
        """No batch on so many machines, one or more, is trained faster than this, whatever the grid."""
        ...

    def largest_pipelines(self, *, stages: int, machines: int) -> int:
        """The most pipelines of so many stages that the machines can host and that have a step time; 0 if none."""
        ...


@dataclass(frozen=True)
class StepTable:
    """Step times measured for some grids, as published for a model.

    For other grids and for workers that host several coordinates it interpolates: a row of D pipelines of P stages is
    a step in which every worker does 1 / (D P) of the work, and step time is close to linear in that share (time of
    the busiest worker, plus a part that doesn't shrink: filling the pipeline, communication). Beyond the row with the
    most workers it stays at that row's time, since nothing says that it would still improve.

    Attributes:
        name: whose table; for messages.
        seconds: by grid.
        layers: what stages are made of, so that uneven ones cost what the largest does; 0: any cut is even.
    """

    name: str
    seconds: Mapping[Grid, float]
    layers: int = 0

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ScenarioError(f"the step table of {self.name} is empty: give at least one grid's step time")
        for grid, seconds in self.seconds.items():
            if grid.pipelines < 1 or grid.stages < 1 or not seconds > 0:
                raise ScenarioError(
                    f"the step table of {self.name} has {seconds} s at {grid.pipelines}x{grid.stages}: "
                    "pipelines and stages are 1 or more and a step takes more than 0 s"
                )

    @cached_property
    def _points(self) -> tuple[tuple[float, float], ...]:
        """(share of the busiest worker, seconds), rising in the share; seconds never falling.

        A row with more workers that is slower than one with fewer says nothing about a lighter load: it is left out.
        """
        best: dict[float, float] = {}
        for grid, seconds in self.seconds.items():
            share = self._share(grid)
            best[share] = min(seconds, best.get(share, seconds))
        kept: list[tuple[float, float]] = []
        for share, seconds in sorted(best.items(), reverse=True):
            if not kept or seconds < kept[-1][1]:
                kept.append((share, seconds))
        return tuple(reversed(kept))

    def _share(self, grid: Grid) -> float:
        largest_stage = math.ceil(self.layers / grid.stages) / self.layers if self.layers else 1.0 / grid.stages
        return largest_stage / grid.pipelines

    def grid_seconds(self, grid: Grid) -> float:
        """See StepTimes."""
        if grid not in self.seconds:
            known = ", ".join(f"{one.pipelines}x{one.stages}" for one in sorted(self.seconds))
            raise MissingStepTimeError(
                f"{self.name} has no step time for the grid {grid.pipelines}x{grid.stages} (pipelines x stages): "
                f"known are {known}; add the row to its table, or give a profile instead of a table"
            )
        return self.seconds[grid]

    def hosted_seconds(self, grid: Grid, *, most_hosted: int) -> float:
        """See StepTimes. A measured row where there is one."""
        if most_hosted == 1 and grid in self.seconds:
            return self.seconds[grid]
        if self.layers and grid.stages > self.layers:
            raise MissingStepTimeError(
                f"{self.name} has {self.layers} layers, too few for {grid.stages} stages; use fewer stages"
            )
        return self._interpolated(self._share(grid) * most_hosted)

    def _interpolated(self, share: float) -> float:
        points = self._points
        if share <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            return points[0][1] * share / points[0][0]
        index = min(bisect.bisect_left(points, (share, 0.0)), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * (share - left) / (right - left)

    def fastest_seconds(self, machines: int) -> float:
        """See StepTimes. All machines loaded alike, or the best row, prorated if only some of its pipelines fit."""
        fastest = self._interpolated(1.0 / machines)
        for grid, seconds in self.seconds.items():
            fitting = min(machines // grid.stages, grid.pipelines)
            if fitting:
                fastest = min(fastest, seconds * grid.pipelines / fitting)
        return fastest

    @cached_property
    def _most(self) -> dict[int, int]:
        most: dict[int, int] = {}
        for grid in self.seconds:
            most[grid.stages] = max(grid.pipelines, most.get(grid.stages, 0))
        return most

    def largest_pipelines(self, *, stages: int, machines: int) -> int:
        """See StepTimes. Never more than the table's largest; a hole below that is an error."""
        if stages not in self._most:
            self.grid_seconds(Grid(1, stages))
        pipelines = min(machines // stages, self._most.get(stages, 0))
        if pipelines:
            self.grid_seconds(Grid(pipelines, stages))
        return pipelines


@dataclass(frozen=True)
class ProfiledSteps:
    """Step times of a profiled or hand-written job, from the cost model (sim.cost).

    Attributes:
        profile: the job.
        samples_per_step: the global batch.
        most_pipelines: no grid has more pipelines than this (the batch must still split).
    """

    profile: JobProfile
    samples_per_step: int
    most_pipelines: int

    def grid_seconds(self, grid: Grid) -> float:
        """See StepTimes."""
        return self.hosted_seconds(grid, most_hosted=1)

    @cached_property
    def _known(self) -> dict[tuple[Grid, int], float]:
        return {}

    def hosted_seconds(self, grid: Grid, *, most_hosted: int) -> float:
        """See StepTimes."""
        key = (grid, most_hosted)
        if key not in self._known:
            self._known[key] = self._hosted_seconds(grid, most_hosted)
        return self._known[key]

    def _hosted_seconds(self, grid: Grid, most_hosted: int) -> float:
        if grid.stages > len(self.profile.layers):
            raise MissingStepTimeError(
                f"{self.profile.name} has {len(self.profile.layers)} layers, too few for {grid.stages} stages; "
                "use fewer stages"
            )
        seconds = hosted_step_seconds(
            self.profile,
            pipelines=grid.pipelines,
            stages=grid.stages,
            most_hosted=most_hosted,
            samples_per_step=self.samples_per_step,
        )
        return seconds * (1.0 + redundant_forward_overhead(self.profile))

    def fastest_seconds(self, machines: int) -> float:
        """See StepTimes. All compute spread evenly, nothing else: a bound that no grid reaches."""
        work = total_work_seconds(self.profile, samples_per_step=self.samples_per_step)
        return (work / machines + self.profile.fixed_seconds) * (1.0 + redundant_forward_overhead(self.profile))

    def largest_pipelines(self, *, stages: int, machines: int) -> int:
        """See StepTimes."""
        return min(machines // stages, self.most_pipelines)


@dataclass(frozen=True)
class WithoutRedundancy:
    """The same step times without what eager FRC adds to them.

    Attributes:
        steps: with it.
        overhead: what it adds, as a fraction.
    """

    steps: StepTimes
    overhead: float

    def grid_seconds(self, grid: Grid) -> float:
        """See StepTimes."""
        return self.steps.grid_seconds(grid) / (1.0 + self.overhead)

    def hosted_seconds(self, grid: Grid, *, most_hosted: int) -> float:
        """See StepTimes."""
        return self.steps.hosted_seconds(grid, most_hosted=most_hosted) / (1.0 + self.overhead)

    def fastest_seconds(self, machines: int) -> float:
        """See StepTimes."""
        return self.steps.fastest_seconds(machines) / (1.0 + self.overhead)

    def largest_pipelines(self, *, stages: int, machines: int) -> int:
        """See StepTimes."""
        return self.steps.largest_pipelines(stages=stages, machines=machines)
