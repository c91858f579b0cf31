"""The two ends of the scale: machines that nobody takes, and an oracle that knows the future and pays nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from ..clock import MILLISECONDS_PER_SECOND, NEVER, hours
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress

__all__ = ["OnDemandPolicy", "OraclePolicy"]


class OnDemandPolicy(Policy):
    """Trains from the moment that all its machines have booted; nothing ever happens to them."""

    name: ClassVar[str] = "on-demand"

    def __init__(self, progress: Progress, ledger: Ledger, *, machines: int, step_milliseconds: int) -> None:
        super().__init__(progress, ledger)
        self._missing = machines
        self._step_milliseconds = step_milliseconds

    def ready(self, now: int, node: str) -> None:
        """See Policy."""
        self._missing -= 1
        if self._missing == 0:
            self.ledger.enter(now, Mode.RUNNING)
            self.progress.start(now, self._step_milliseconds)

    def removed(self, now: int, node: str) -> None:
        """See Policy. Never called."""


class OraclePolicy(Policy):
    """At every instant the best rate that the model has on the machines granted: no boot, no pause, no redundancy.

    It knows the future and pays nothing, so it is the bound for every policy on the same spot machines. It counts
    parts of steps. What it pays for are the machines, like everyone.
    """

    name: ClassVar[str] = "oracle"

    def __init__(self, progress: Progress, ledger: Ledger, *, least_seconds: Callable[[int], float]) -> None:
        """`least_seconds` of a number of machines: no step takes less, whatever the policy."""
        super().__init__(progress, ledger)
        self._least_seconds = least_seconds
        self._samples = 0.0
        self._since = 0
        self._rates: dict[int, float] = {0: 0.0}
        self._rate = 0.0
        self._dollars = 0.0

    def ready(self, now: int, node: str) -> None:
        """See Policy. Booting makes no difference to it."""

    def removed(self, now: int, node: str) -> None:
        """See Policy. `settle` finds out."""

    def settle(self, now: int) -> None:
        """See Policy: the rate changes with the number of machines."""
        self._advance(now)
        machines = self.ledger.machines
        if machines not in self._rates:
            seconds = self._least_seconds(machines)
            self._rates[machines] = self.progress.batch / (seconds * MILLISECONDS_PER_SECOND)
        self._rate = self._rates[machines]
        self.ledger.enter(now, Mode.RUNNING if self._rate else Mode.IDLE)
        if self.progress.first_start is None and self._rate:
            self.progress.first_start = now
        target = self.progress.target_steps
        if target is None or not self._rate:
            self.alarm_at = NEVER
        else:
            self.alarm_at = now + max(0, math.ceil((target * self.progress.batch - self._samples) / self._rate))

    def _advance(self, now: int) -> None:
        gained = self._rate * (now - self._since)
        self.ledger.accrue(now)
        spent, self._dollars = self.ledger.dollars - self._dollars, self.ledger.dollars
        if spent > 0.0:
            self.progress.ratio_hours += gained * hours(now - self._since) / (spent * 3600.0)
        if self.ledger.series is not None:
            self.ledger.series.samples.spread(self._since, now, gained)
        self._samples += gained
        self._since = now
        progress = self.progress
        # Rounded up, so that rounding never puts the bound below what it bounds.
        progress.samples = math.ceil(self._samples - 1e-6)
        progress.steps = progress.samples // progress.batch
        progress.last_step_at = now
        progress.last_step_machine_milliseconds = self.ledger.machine_milliseconds
        progress.last_step_dollars = self.ledger.dollars

    def alarm(self, now: int) -> None:
        """See Policy: the target is reached."""
        self._advance(now)
        self.alarm_at = NEVER
        if self.progress.target_steps is not None:
            self.progress.steps = self.progress.target_steps

    def ended(self, now: int) -> None:
        """See Policy."""
        target = self.progress.target_steps
        self._advance(now)
        if target is not None:
            self.progress.steps = min(self.progress.steps, target)
            self.progress.samples = min(self.progress.samples, target * self.progress.batch)
