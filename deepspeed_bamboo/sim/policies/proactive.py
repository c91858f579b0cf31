"""Proactive migration as in Parcae (NSDI'24): the grid follows the predicted number of machines; no redundancy.

Every interval the number of machines is predicted and the grid planned that is expected to deliver the most (see
liveput.py). A loss is met by the cheapest migration that keeps going; planned ones take place at the end of a step.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..liveput import (
    MigrationCosts,
    Planner,
    Survivors,
    counted_survivors,
    migration_between,
    sampled_survivors,
)
from ..predict import Scoreboard, named_predictors
from ..progress import Progress
from ..scenario import ProactiveSpec
from ..steptimes import Grid, StepTimes

__all__ = ["ProactivePolicy"]


class ProactivePolicy(Policy):
    """See the module."""

    name: ClassVar[str] = "proactive"

    def __init__(
        self,
        progress: Progress,
        ledger: Ledger,
        *,
        spec: ProactiveSpec,
        steps: StepTimes,
        model_state_bytes: float,
        generator: random.Random,
    ) -> None:
        super().__init__(progress, ledger)
        self._spec = spec
        self._generator = generator
        self._costs = MigrationCosts(
            spec.intra_stage_seconds,
            spec.inter_stage_seconds,
            spec.pipeline_seconds,
            spec.restore_seconds,
            rework_seconds=spec.checkpoint_seconds / 2.0,
            model_state_bytes=model_state_bytes,
            link_bytes_per_second=spec.link_bytes_per_second,
        )
        self._planner = Planner(
            steps,
            progress.batch,
            range(spec.least_stages, spec.most_stages + 1),
            self._costs,
            spec.interval_seconds,
            self._survivors,
        )
        self._board = Scoreboard(named_predictors(spec.predictors), spec.look_ahead, spec.history)
        self._ready: dict[str, None] = {}
        self._grid: Grid | None = None
        self._target: Grid | None = None
        # Machines of the running grid, by the stage that each holds.
        self._stage: dict[str, int] = {}
        self._replicas: Counter[int] = Counter()  # of each stage
        self._hit = False
        self._running = False
        self._interval = to_milliseconds(spec.interval_seconds)
        self._tick_at = 0
        self._resume_at = NEVER
        self.alarm_at = 0

    def _survivors(self, grid: Grid, machines: int, preempted: int) -> Survivors:
        if preempted <= self._spec.exact_limit:
            return counted_survivors(grid, machines=machines, preempted=preempted)
        return sampled_survivors(
            grid, machines=machines, preempted=preempted, samples=self._spec.samples, generator=self._generator
        )

    def ready(self, now: int, node: str) -> None:
        """See Policy. If nothing runs for want of machines, this may be the one that was missing."""
        self._ready[node] = None
        if not self._running and self._resume_at == NEVER:
            self._migrate(now)

    def removed(self, now: int, node: str) -> None:
        """See Policy. All losses of one instant are met together, in `settle`."""
        self._ready.pop(node, None)
        stage = self._stage.pop(node, None)
        if stage is not None:
            self._replicas[stage] -= 1
            self._hit = True

    def settle(self, now: int) -> None:
        """See Policy."""
        if not self._hit:
            return
        self._hit = False
        if self._least_replicas() == 0:
            self.ledger.fatal_losses += 1
            self.progress.roll_back(now)
            self._grid = None
            self._hold({})
        else:
            self.ledger.failovers += 1
            self.progress.stop(now)
        self._migrate(now, extra_seconds=self._spec.detect_seconds)

    def _least_replicas(self) -> int:
        if self._grid is None:
            return 0
        return min(self._replicas[stage] for stage in range(self._grid.stages))

    def _hold(self, stage_of: dict[str, int]) -> None:
        self._stage, self._replicas = stage_of, Counter(stage_of.values())

    def _migrate(self, now: int, *, extra_seconds: float = 0.0) -> None:
        """Choose a grid for the machines that there are, and stand still until it is set up."""
        least = self._least_replicas()
        target = self._planned(least)
        self._running = False
        if target is None:
            self._resume_at = NEVER
            self._set_alarm()
            self.ledger.enter(now, Mode.IDLE)
            return
        kind = migration_between(self._grid, target, least_replicas=least)
        self._target = target
        self._resume_at = now + to_milliseconds(self._costs.seconds(kind, stages=target.stages) + extra_seconds)
        self._set_alarm()
        self.ledger.enter(now, Mode.PAUSED)

    def _planned(self, least_replicas: int) -> Grid | None:
        expected = self._board.forecast() if self._board.history else ()
        forecast = [max(0, round(count)) for count in expected]
        return self._planner.plan(
            self._grid, least_replicas=least_replicas, machines=len(self._ready), forecast=forecast
        )

    def _set_alarm(self) -> None:
        self.alarm_at = min(self._tick_at, self._resume_at)

    def alarm(self, now: int) -> None:
        """See Policy: an interval has passed, or a migration is done."""
        if now == self._resume_at:
            self._resume_at = NEVER
            self._resume(now)
        if now == self._tick_at:
            self._tick_at = now + self._interval
            self._board = self._board.observe(self.ledger.machines)
            if self._running and self._planned(self._least_replicas()) != self._grid:
                self.wants_step_end = True
        self._set_alarm()

    def _resume(self, now: int) -> None:
        target = self._target
        if target is None or target.size > len(self._ready):
            # A standby went that the plan had counted on.
            self._migrate(now)
            return
        self._assign(target)
        self._grid = target
        self._running = True
        self.ledger.enter(now, Mode.RUNNING)
        seconds = self._planner.step_seconds(target)
        self.progress.start(now, max(1, math.ceil(seconds * MILLISECONDS_PER_SECOND)))

    def _assign(self, target: Grid) -> None:
        """D machines a stage: those that hold it already where the stages stay the same, then any others."""
        keep = self._stage if self._grid is not None and self._grid.stages == target.stages else {}
        held: Counter[int] = Counter()
        stage_of: dict[str, int] = {}
        for node, stage in keep.items():
            if held[stage] < target.pipelines:
                stage_of[node] = stage
                held[stage] += 1
        spare = (node for node in self._ready if node not in stage_of)
        for stage in range(target.stages):
            for _ in range(target.pipelines - held[stage]):
                stage_of[next(spare)] = stage
        self._hold(stage_of)

    def step_ended(self, now: int) -> None:
        """See Policy: a planned migration, if it is still the plan."""
        self.wants_step_end = False
        target = self._planned(self._least_replicas())
        if target is None or target == self._grid:
            return
        self.ledger.reconfigurations += 1
        self.progress.hold()
        self._migrate(now)
