"""Sample dropping: a pipeline that lost a machine is left out, with the samples it would have trained.

The other strawman of the Bamboo paper. Nothing is recomputed; but the model sees fewer samples a step, which the
throughput here counts and the effect on convergence, which it doesn't, comes on top.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..scenario import DroppingSpec
from ..steptimes import Grid, StepTimes

__all__ = ["DroppingPolicy"]


class DroppingPolicy(Policy):
    """See the module. Left-over machines of a broken pipeline stand by until a whole one can be made of standbys."""

    name: ClassVar[str] = "dropping"

    def __init__(self, progress: Progress, ledger: Ledger, *, spec: DroppingSpec, steps: StepTimes) -> None:
        super().__init__(progress, ledger)
        self._spec = spec
        self._steps = steps
        self._ready: dict[str, None] = {}
        # Which pipeline a machine works in, each whole pipeline's machines, and how many there were at the rendezvous.
        self._pipeline: dict[str, int] = {}
        self._whole: dict[int, list[str]] = {}
        self._planned = 0
        self._regrouping = False

    def ready(self, now: int, node: str) -> None:
        """See Policy."""
        self._ready[node] = None
        if self._whole:
            self.wants_step_end = True
        elif self.alarm_at == NEVER:
            self._meet(now, self._spec.first_rendezvous_seconds)

    def removed(self, now: int, node: str) -> None:
        """See Policy: the machine's pipeline is dropped; without any left, the state is gone."""
        self._ready.pop(node, None)
        lost = self._pipeline.get(node)
        if lost is None:
            return
        for member in self._whole.pop(lost):
            del self._pipeline[member]
        if self._whole:
            self.ledger.failovers += 1
            self.progress.stop(now)
            if self._regrouping or self.alarm_at == NEVER:
                self._regrouping = True
                self.ledger.enter(now, Mode.PAUSED)
                self.alarm_at = now + to_milliseconds(self._spec.detect_seconds + self._spec.regroup_seconds)
            return
        self.ledger.fatal_losses += 1
        self.progress.roll_back(now)
        spec = self._spec
        self._meet(now, spec.detect_seconds + spec.first_rendezvous_seconds + spec.restore_seconds)

    def _meet(self, now: int, seconds: float) -> None:
        self._regrouping = False
        self.ledger.enter(now, Mode.PAUSED)
        self.alarm_at = now + to_milliseconds(seconds)

    def alarm(self, now: int) -> None:
        """See Policy: pipelines are rebuilt after a rendezvous, or continue without a dropped one."""
        self.alarm_at = NEVER
        if not self._regrouping:
            self._assign()
        self._regrouping = False
        if not self._whole:
            self.ledger.enter(now, Mode.IDLE)
            return
        self.ledger.enter(now, Mode.RUNNING)
        seconds = self._steps.grid_seconds(Grid(self._planned, self._spec.stages))
        self.progress.start(
            now,
            max(1, math.ceil(seconds * MILLISECONDS_PER_SECOND)),
            samples=self.progress.batch * len(self._whole) // self._planned,
        )
        self.wants_step_end = True

    def _assign(self) -> None:
        stages = self._spec.stages
        self._planned = self._steps.largest_pipelines(stages=stages, machines=len(self._ready))
        working = list(self._ready)[: self._planned * stages]
        self._pipeline = {node: index // stages for index, node in enumerate(working)}
        self._whole = {index: working[index * stages : (index + 1) * stages] for index in range(self._planned)}

    def step_ended(self, now: int) -> None:
        """See Policy: one more pipeline, when there are machines for it."""
        self.wants_step_end = False
        possible = self._steps.largest_pipelines(stages=self._spec.stages, machines=len(self._ready))
        if possible > len(self._whole):
            self.ledger.reconfigurations += 1
            self.progress.hold()
            self._meet(now, self._spec.rendezvous_seconds)
