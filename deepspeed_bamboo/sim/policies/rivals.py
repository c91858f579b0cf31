"""Other ways to survive losses, as far as their papers say how: in the manner of Oobleck, CheckFree and ReCycle.

Each is given the benefit of the doubt: what the paper does not charge is free here, and what one machine of a pipeline
can't do, its peers of the other pipelines can.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..scenario import ReroutingSpec
from ..steptimes import Grid, StepTimes
from .restarting import RestartCosts, VarunaPolicy

__all__ = ["ReinstantiatingPolicy", "ReroutingPolicy"]


class ReinstantiatingPolicy(VarunaPolicy):
    """New pipelines of the machines that are left, without a step back as long as every stage has a replica.

    In the manner of Oobleck (SOSP'23): pipelines are made of templates for any number of machines, and layers copied
    from other pipelines. With `without_replicas` in the manner of CheckFree (2025): a lost stage is made of its
    neighbours, so no loss is fatal; what that costs of convergence is not counted here.
    """

    name: ClassVar[str] = "oobleck-like"

    def __init__(
        self,
        progress: Progress,
        ledger: Ledger,
        *,
        costs: RestartCosts,
        steps: StepTimes,
        stages: range,
        rollback_seconds: float,
        without_replicas: bool = False,
    ) -> None:
        """`costs` are of a reconfiguration; `rollback_seconds` come on top where a checkpoint is loaded."""
        super().__init__(progress, ledger, costs=costs, steps=steps, stages=stages)
        self._rollback_seconds, self._without_replicas = rollback_seconds, without_replicas
        self._stage: dict[str, int] = {}

    def removed(self, now: int, node: str) -> None:
        """See Policy."""
        missed = self._takes_part(node)
        stage = self._stage.pop(node, None)
        self._ready.pop(node, None)
        self._came.discard(node)
        if not missed:
            return
        alone = stage is not None and stage not in self._stage.values()
        if alone and not self._without_replicas:
            self.ledger.fatal_losses += 1
            self.progress.roll_back(now)
            self._stage.clear()
            self._restart(now, extra_seconds=self._costs.detect_seconds + self._rollback_seconds)
            return
        self.ledger.failovers += 1
        self.progress.stop(now)
        self._restart(now, extra_seconds=self._costs.detect_seconds)

    def alarm(self, now: int) -> None:
        """See Policy: who holds which stage is known from here on."""
        super().alarm(now)
        stages = 0 if self._grid is None else self._grid.stages
        if stages:
            ordered = (node for node in self._ready if node in self._active)
            self._stage = {node: index % stages for index, node in enumerate(ordered)}


class ReroutingPolicy(Policy):
    """A lost machine's micro-batches go to its peers, the same stage of other pipelines (ReCycle, SOSP'24).

    A step takes as long as the stage with the fewest machines needs for all micro-batches, and bubbles hide what they
    can. Machines that come take the places of lost ones at the end of a step; another pipeline is a restart.
    """

    name: ClassVar[str] = "recycle-like"

    def __init__(
        self,
        progress: Progress,
        ledger: Ledger,
        *,
        spec: ReroutingSpec,
        steps: StepTimes,
        busy_seconds: Callable[[Grid], float],
    ) -> None:
        """`busy_seconds` of a grid: what a stage computes in a step, without bubbles."""
        super().__init__(progress, ledger)
        self._spec, self._steps, self._busy_seconds = spec, steps, busy_seconds
        self._ready: dict[str, None] = {}
        self._stage: dict[str, int] = {}
        self._grid: Grid | None = None
        self._anew = True

    def ready(self, now: int, node: str) -> None:
        """See Policy."""
        self._ready[node] = None
        if self._grid is not None and self.alarm_at == NEVER:
            self.wants_step_end = True
        elif self.alarm_at == NEVER:
            self._pause(now, self._spec.restart_seconds, anew=True)

    def removed(self, now: int, node: str) -> None:
        """See Policy."""
        self._ready.pop(node, None)
        stage = self._stage.pop(node, None)
        if stage is None:
            return
        spec = self._spec
        if stage not in self._stage.values():
            self.ledger.fatal_losses += 1
            self.progress.roll_back(now)
            self._stage.clear()
            self._pause(now, spec.detect_seconds + spec.restart_seconds + spec.restore_seconds, anew=True)
            return
        self.ledger.failovers += 1
        self.progress.stop(now)
        self._pause(now, spec.detect_seconds + spec.reroute_seconds, anew=self._anew and self.alarm_at != NEVER)

    def _pause(self, now: int, seconds: float, *, anew: bool) -> None:
        self._anew = anew
        self.ledger.enter(now, Mode.PAUSED)
        self.alarm_at = now + to_milliseconds(seconds)

    def alarm(self, now: int) -> None:
        """See Policy: train on."""
        self.alarm_at = NEVER
        if self._anew:
            self._anew = False
            pipelines = self._steps.largest_pipelines(stages=self._spec.stages, machines=len(self._ready))
            self._grid = Grid(pipelines, self._spec.stages) if pipelines else None
            self._stage = {}
        if self._grid is None:
            self.ledger.enter(now, Mode.IDLE)
            return
        self._fill()
        self.ledger.enter(now, Mode.RUNNING)
        self.progress.start(now, max(1, math.ceil(self._seconds() * MILLISECONDS_PER_SECOND)))
        self.wants_step_end = self._is_wanting() or self._wanted_pipelines() > self._grid.pipelines

    def _fill(self) -> None:
        """Machines that stand by take the places of lost ones."""
        if self._grid is None:
            return
        held = Counter(self._stage.values())
        spare = (node for node in self._ready if node not in self._stage)
        missing = [stage for stage in range(self._grid.stages) for _ in range(self._grid.pipelines - held[stage])]
        self._stage |= dict(zip(itertools.islice(spare, len(missing)), missing, strict=False))

    def _seconds(self) -> float:
        if self._grid is None:
            raise RuntimeError("there is no grid yet")
        held = Counter(self._stage.values())
        fewest = min(held[stage] for stage in range(self._grid.stages))
        busy = self._busy_seconds(self._grid) * self._grid.pipelines / fewest
        return max(self._steps.grid_seconds(self._grid), busy)

    def _is_wanting(self) -> bool:
        return self._grid is not None and len(self._stage) < min(self._grid.size, len(self._ready))

    def _wanted_pipelines(self) -> int:
        return self._steps.largest_pipelines(stages=self._spec.stages, machines=len(self._ready))

    def step_ended(self, now: int) -> None:
        """See Policy."""
        self.wants_step_end = False
        if self._grid is None:
            return
        if self._wanted_pipelines() > self._grid.pipelines:
            self.ledger.reconfigurations += 1
            self.progress.save()
            self.progress.hold()
            self._pause(now, self._spec.restart_seconds, anew=True)
        elif self._is_wanting():
            self.ledger.reconfigurations += 1
            self.progress.hold()
            self._pause(now, self._spec.reroute_seconds, anew=False)
