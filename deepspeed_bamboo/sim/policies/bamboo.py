"""Bamboo as published (NSDI'23): predecessor shadows, standby machines, rendezvous, reconfiguration rules.

The rules are those of the authors' public simulator. What that simulator does besides, and a real system would not,
is named in `Oddities`, each a switch: all on is `bamboo-published`, which reproduces the published figures; all off
is `bamboo`, the same design without them. docs/simulator.md says what each is worth.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..steptimes import Grid, StepTimes

__all__ = ["BambooPolicy", "BambooRules", "Oddities"]


@dataclass(frozen=True)
class Oddities:
    """Behaviour of the authors' simulator that no real system has. All off by default.

    Attributes:
        repeated_timeout: a fatal loss or reconfiguration during a rendezvous queues another time-out; when that one
            rings after the rendezvous has ended, nobody is in it, and training stops until the next machine is ready.
        steps_in_rendezvous: after a fatal loss, steps keep completing until the rendezvous ends.
        no_rollback: a fatal loss loses no steps.
        any_loss_slows: losing a machine that hosts nothing slows the step, too.
        stale_standby: a standby that is taken still counts as waiting until the next rendezvous.
    """

    repeated_timeout: bool = False
    steps_in_rendezvous: bool = False
    no_rollback: bool = False
    any_loss_slows: bool = False
    stale_standby: bool = False


@dataclass(frozen=True)
class BambooRules:
    """The parameters of the published design.

    Attributes:
        stages: of every pipeline; as many pipelines as machines allow.
        first_rendezvous_seconds: to begin training, and to begin it again after a fatal loss.
        rendezvous_seconds: to reconfigure.
        failover_slowdown: what a step is multiplied by from a failover to the next rendezvous.
        risk_threshold: reconfigure when more than this part of the workers can't be lost without a fatal loss.
        restore_seconds: to load one, on top of the rendezvous; without rollback it isn't paid.
        oddities: of the authors' simulator.
    """

    stages: int
    first_rendezvous_seconds: float = 30.0
    rendezvous_seconds: float = 20.0
    failover_slowdown: float = 1.5
    risk_threshold: float = 0.05
    restore_seconds: float = 14.0
    oddities: Oddities = Oddities()


class _Status(enum.Enum):
    STOPPED = enum.auto()
    RENDEZVOUS = enum.auto()
    RUNNING = enum.auto()


_FIRST, _LATER = 0, 1


class BambooPolicy(Policy):
    """See the module. Coordinates are (pipeline, stage); the shadow of one is on the worker of its predecessor."""

    name: ClassVar[str] = "bamboo"

    def __init__(
        self, progress: Progress, ledger: Ledger, *, rules: BambooRules, steps: StepTimes, redundancy_share: float
    ) -> None:
        super().__init__(progress, ledger)
        self._rules = rules
        self._steps = steps
        self.redundancy_share = redundancy_share
        self._status = _Status.STOPPED
        # Booted machines in the order in which they came, with the coordinates that each hosts (none: a standby).
        self._hosted: dict[str, list[tuple[int, int]]] = {}
        self._host: dict[tuple[int, int], str] = {}
        self._gathered: list[str] = []
        self._timeouts: list[tuple[int, int]] = []
        self._grid = Grid(0, 0)
        self._coordinates: list[tuple[int, int]] = []
        self._overloaded = 0
        self._waiting = 0
        self._slowed = False
        self._fitting: dict[int, int] = {}

    def ready(self, now: int, node: str) -> None:
        """See Policy. A standby waits for the next reconfiguration; the first machine of all begins a rendezvous."""
        self._hosted[node] = []
        if self._status is _Status.STOPPED:
            self._rendezvous(now, _FIRST)
        elif self._status is _Status.RENDEZVOUS:
            self._gathered.append(node)
        else:
            self._waiting += 1
        self.wants_step_end = True

    def removed(self, now: int, node: str) -> None:
        """See Policy. The predecessor's worker takes over, unless that makes it host a third coordinate."""
        hosted = self._hosted.pop(node, None)
        self.wants_step_end = True
        if hosted and not self._fail_over(hosted):
            self._lose_all(now)
            return
        if hosted == [] and self._status is _Status.RUNNING and not self._rules.oddities.stale_standby:
            self._waiting -= 1
        if self._status is _Status.RUNNING and not self._slowed and (hosted or self._rules.oddities.any_loss_slows):
            self._slowed = True
            self.progress.stretch(now, self._rules.failover_slowdown)

    def _fail_over(self, hosted: list[tuple[int, int]]) -> bool:
        """Move a lost machine's coordinate to its shadow's worker; False if the loss is fatal."""
        if len(hosted) > 1:
            self._overloaded -= 1
            return False
        (pipeline, stage) = hosted[0]
        shadow = self._host.get((pipeline, stage - 1 if stage else self._grid.stages - 1))
        if shadow is None or shadow not in self._hosted:
            # Its shadow went with a fatal loss whose rendezvous is under way: this changes nothing.
            return True
        if len(self._hosted[shadow]) > 1:
            return False
        self._hosted[shadow].append(hosted[0])
        self._host[hosted[0]] = shadow
        self._overloaded += 1
        self.ledger.failovers += 1
        return True

    def _lose_all(self, now: int) -> None:
        """A fatal loss: everyone meets again, from the last checkpoint."""
        self.ledger.fatal_losses += 1
        odd = self._rules.oddities
        if not odd.no_rollback:
            self.progress.roll_back(now)
        if not odd.steps_in_rendezvous:
            self.progress.stop(now)
        self._rendezvous(now, _FIRST, extra_seconds=0.0 if odd.no_rollback else self._rules.restore_seconds)

    def _rendezvous(self, now: int, kind: int, *, extra_seconds: float = 0.0) -> None:
        """Begin a rendezvous, or begin it again: every booted machine takes part."""
        self._status = _Status.RENDEZVOUS
        self.ledger.enter(now, Mode.PAUSED)
        self._gathered = list(self._hosted)
        if not self._rules.oddities.repeated_timeout:
            self._timeouts.clear()
        rules = self._rules
        seconds = rules.first_rendezvous_seconds if kind == _FIRST else rules.rendezvous_seconds
        heapq.heappush(self._timeouts, (now + to_milliseconds(seconds + extra_seconds), kind))
        self.alarm_at = self._timeouts[0][0]

    def alarm(self, now: int) -> None:
        """A rendezvous has taken its time. If a machine in it is gone by now, it begins again."""
        _, kind = heapq.heappop(self._timeouts)
        self.alarm_at = self._timeouts[0][0] if self._timeouts else NEVER
        if not self._hosted.keys() >= set(self._gathered):
            self._rendezvous(now, kind)
            return
        self._assign()
        self._gathered = []
        self._slowed = False
        self.progress.hold()
        if not self._grid.pipelines:
            self._status = _Status.STOPPED
            self.ledger.enter(now, Mode.IDLE)
            return
        self._status = _Status.RUNNING
        self.ledger.enter(now, Mode.RUNNING)
        seconds = self._steps.grid_seconds(self._grid)
        self.progress.start(now, max(1, round(seconds * MILLISECONDS_PER_SECOND)))
        self.wants_step_end = True

    def _assign(self) -> None:
        """Give the grid's coordinates to those gathered, one each in their order; the rest stand by."""
        pipelines, stages = self._pipelines_for(len(self._gathered)), self._rules.stages
        if self._grid.pipelines != pipelines:
            self._grid = Grid(pipelines, stages) if pipelines else Grid(0, 0)
            self._coordinates = [(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
        self._waiting = max(0, len(self._gathered) - self._grid.size)
        if not self._gathered:
            return  # Only after a repeated time-out: machines keep what they hosted.
        self._host = dict(zip(self._coordinates, self._gathered, strict=False))
        self._hosted = {node: [] for node in self._hosted}
        for coordinate, node in self._host.items():
            self._hosted[node] = [coordinate]
        self._overloaded = 0

    def _pipelines_for(self, machines: int) -> int:
        if machines not in self._fitting:
            self._fitting[machines] = self._steps.largest_pipelines(stages=self._rules.stages, machines=machines)
        return self._fitting[machines]

    def step_ended(self, now: int) -> None:
        """See Policy: reconfigure, if a rule says so."""
        self.wants_step_end = False
        if self._should_reconfigure():
            self.ledger.reconfigurations += 1
            self.progress.hold()
            self._rendezvous(now, _LATER)

    def _should_reconfigure(self) -> bool:
        """Rebalance if standbys suffice; if too many workers have become critical; if one more pipeline fits."""
        overloaded, active = self._overloaded, self._grid.size - self._overloaded
        if overloaded and (self._waiting >= overloaded or active <= 0):
            return True
        if overloaded and 2 * overloaded / active > self._rules.risk_threshold:
            return True
        return self._pipelines_for(active + self._waiting) > self._grid.pipelines
