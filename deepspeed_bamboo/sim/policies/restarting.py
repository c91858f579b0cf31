"""Checkpoint and restart, and morphing in the manner of Varuna (EuroSys'22): every change restarts the job.

A lost machine takes the job back to the last checkpoint. To use machines that came, a checkpoint is taken at the end
of a step, so that nothing is lost, and the job restarts likewise. What they pay for a restart is stated and generous:
the processes start, meet and load within `restart_seconds` + `restore_seconds`, whatever the size of the job.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..steptimes import Grid, StepTimes

__all__ = ["CheckpointPolicy", "RestartCosts", "VarunaPolicy", "best_grid"]

# A planned restart must promise more than this: (1 + 0.1) x the throughput pays a restart of a minute in ten.
_LEAST_GAIN = 0.1


@dataclass(frozen=True)
class RestartCosts:
    """What a restart takes.

    Attributes:
        restart_seconds: to end the job and start it again.
        restore_seconds: to load the checkpoint.
        checkpoint_slowdown: what every step is multiplied by for the checkpoints that are taken meanwhile.
        detect_seconds: until a loss is known.
    """

    restart_seconds: float
    restore_seconds: float
    checkpoint_slowdown: float
    detect_seconds: float = 0.0


class _RestartingPolicy(Policy):
    """What the two have in common; they differ in the grid that they choose."""

    def __init__(self, progress: Progress, ledger: Ledger, *, costs: RestartCosts, steps: StepTimes) -> None:
        super().__init__(progress, ledger)
        self._costs = costs
        self._steps = steps
        self._ready: dict[str, None] = {}
        self._active: set[str] = set()
        # Those that came during a restart: nobody misses them before it is done.
        self._came: set[str] = set()
        self._grid: Grid | None = None

    @abstractmethod
    def choose(self, machines: int) -> tuple[Grid, float] | None:
        """The grid for so many machines, with its step time in seconds; None if none fits."""

    def ready(self, now: int, node: str) -> None:
        """See Policy."""
        self._ready[node] = None
        self._came.add(node)
        if self._grid is not None:
            self.wants_step_end = True
        elif self.alarm_at == NEVER:
            self._restart(now)

    def removed(self, now: int, node: str) -> None:
        """See Policy. A standby is not missed."""
        missed = self._takes_part(node)
        self._ready.pop(node, None)
        self._came.discard(node)
        if missed:
            self.ledger.fatal_losses += 1
            self.progress.roll_back(now)
            self._restart(now, extra_seconds=self._costs.detect_seconds)

    def _takes_part(self, node: str) -> bool:
        """Whether the running job, or the restart that is under way, counts on the machine."""
        if self._grid is None and self.alarm_at != NEVER:
            return node in self._ready and node not in self._came
        return node in self._active

    def _restart(self, now: int, *, extra_seconds: float = 0.0) -> None:
        """Begin, or begin again: a loss during a restart starts it over."""
        self._grid = None
        self._active = set()
        self._came.clear()
        self.ledger.enter(now, Mode.PAUSED)
        self.alarm_at = now + to_milliseconds(self._costs.restart_seconds + self._costs.restore_seconds + extra_seconds)

    def alarm(self, now: int) -> None:
        """See Policy: the restart is done; those who came meanwhile take part."""
        self.alarm_at = NEVER
        chosen = self.choose(len(self._ready))
        if chosen is None:
            self._active = set()
            self.ledger.enter(now, Mode.IDLE)
            return
        self._grid, seconds = chosen
        self._active = set(itertools.islice(self._ready, self._grid.size))
        self.ledger.enter(now, Mode.RUNNING)
        slowed = seconds * self._costs.checkpoint_slowdown
        self.progress.start(now, max(1, math.ceil(slowed * MILLISECONDS_PER_SECOND)))
        self.wants_step_end = len(self._ready) > self._grid.size

    def step_ended(self, now: int) -> None:
        """See Policy: restart on a better grid, if there is one that is worth it."""
        self.wants_step_end = False
        chosen = self.choose(len(self._ready))
        if chosen is None:
            return
        gain = self.progress.seconds_per_step / (chosen[1] * self._costs.checkpoint_slowdown) - 1.0
        if chosen[0] != self._grid and gain > _LEAST_GAIN:
            self.ledger.reconfigurations += 1
            self.progress.save()
            self.progress.hold()
            self._restart(now)


class CheckpointPolicy(_RestartingPolicy):
    """Checkpoint and restart, with as many pipelines of the configured stages as fit."""

    name: ClassVar[str] = "checkpoint"

    def __init__(
        self, progress: Progress, ledger: Ledger, *, costs: RestartCosts, steps: StepTimes, stages: int
    ) -> None:
        super().__init__(progress, ledger, costs=costs, steps=steps)
        self._stages = stages

    def choose(self, machines: int) -> tuple[Grid, float] | None:
        """See _RestartingPolicy."""
        pipelines = self._steps.largest_pipelines(stages=self._stages, machines=machines)
        if not pipelines:
            return None
        grid = Grid(pipelines, self._stages)
        return grid, self._steps.grid_seconds(grid)


class VarunaPolicy(_RestartingPolicy):
    """Morphing: the best of all grids for the machines that there are."""

    name: ClassVar[str] = "varuna"

    def __init__(
        self, progress: Progress, ledger: Ledger, *, costs: RestartCosts, steps: StepTimes, stages: range
    ) -> None:
        super().__init__(progress, ledger, costs=costs, steps=steps)
        self._stages = stages
        self._chosen: dict[int, tuple[Grid, float] | None] = {}

    def choose(self, machines: int) -> tuple[Grid, float] | None:
        """See _RestartingPolicy."""
        if machines not in self._chosen:
            self._chosen[machines] = best_grid(self._steps, machines=machines, stages=self._stages)
        return self._chosen[machines]


def best_grid(steps: StepTimes, *, machines: int, stages: range) -> tuple[Grid, float] | None:
    """The grid with the shortest step on at most so many machines, the smallest among equals; None if none fits."""
    candidates = (
        (steps.hosted_seconds(Grid(machines // one, one), most_hosted=1), Grid(machines // one, one))
        for one in stages
        if one <= machines
    )
    best = min(candidates, key=lambda candidate: (candidate[0], candidate[1].size), default=None)
    return None if best is None else (best[1], best[0])
