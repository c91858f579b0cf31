"""What a policy of ``core/steering.py`` has seen in the simulator, and what it decides by that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.availability import Availability
from ...core.steering import Action, Fixed, Foregone, Option, Outlook, Policy
from ..clock import MILLISECONDS_PER_SECOND, NEVER

__all__ = ["Steered"]


class Steered:
    """Moments are in milliseconds of simulated time.

    Args:
        policy: decides; None: as the engine does by itself.
        interval_seconds: in which comings and goings are counted.
        loss_seconds: for which nobody trains after a loss.
    """

    def __init__(self, policy: Policy | None, *, interval_seconds: float, loss_seconds: float) -> None:
        self._policy: Policy = Fixed() if policy is None else policy
        self._interval_seconds, self._loss_seconds = interval_seconds, loss_seconds
        self._availability = Availability(interval_seconds=interval_seconds)
        self._changed_at = NEVER
        self._foregone = Foregone()

    @property
    def compares(self) -> bool:
        """Whether it has to be asked."""
        return self._policy.compares

    def saw(self, now: int, *, gone: int) -> None:
        """Machines came or went. What happens at one instant is one change."""
        if gone or now != self._changed_at:
            self._availability = self._availability.changed(now / MILLISECONDS_PER_SECOND, gone=gone)
        self._changed_at = now

    def outlook(self, now: int, *, workers: int) -> Outlook:
        """What is foreseen."""
        seconds = now / MILLISECONDS_PER_SECOND
        self._availability = self._availability.at(seconds)
        return Outlook(workers, self._loss_seconds, self._availability, self._foregone.until(seconds))

    def decide(self, now: int, options: Sequence[Option], *, workers: int) -> tuple[Action, float]:
        """What is done, and after how many seconds it is decided again if nothing happens."""
        decision = self._policy.decide(options, self.outlook(now, workers=workers))
        self._foregone = self._foregone.after(decision, seconds=now / MILLISECONDS_PER_SECOND)
        if decision.action is Action.MOVE:
            return decision.action, math.inf
        return decision.action, min(self._interval_seconds, self._foregone.seconds_to(decision.patience))
