"""How often machines come and go, as a worker or the simulator sees it, and what that says of the next minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from deepspeed_bamboo.core.foreseeing import (
    Predictor,
    Scoreboard,
    long_average,
    moving_average,
    persistence,
    squared,
)

INTERVAL_SECONDS = 60.0
LOOK_AHEAD = 12
"""Intervals that are foreseen."""
_HISTORY = 60
_PREDICTORS: Mapping[str, Predictor] = {
    "long-average": long_average,
    "moving-average": moving_average,
    "persistence": persistence,
}


def _board() -> Scoreboard:
    return Scoreboard(_PREDICTORS, LOOK_AHEAD, _HISTORY, squared)


@dataclass(frozen=True)
class Availability:
    """What was seen, by intervals. Seconds are of any clock that only advances.

    Attributes:
        changes: moments at which machines came or went.
        losses: machines that went.
        began_seconds: when the interval of now began; None before the first look.
        open_changes, open_losses: of the interval of now.
        interval_seconds: how long an interval is.
    """

    changes: Scoreboard = field(default_factory=_board)
    losses: Scoreboard = field(default_factory=_board)
    began_seconds: float | None = None
    open_changes: int = 0
    open_losses: int = 0
    interval_seconds: float = INTERVAL_SECONDS

    def at(self, seconds: float) -> Availability:
        """At a later moment, up to which nothing more has happened."""
        if self.began_seconds is None:
            return replace(self, began_seconds=seconds)
        passed = int((seconds - self.began_seconds) / self.interval_seconds)
        if passed <= 0:
            return self
        changes, losses = self.changes.observe(self.open_changes), self.losses.observe(self.open_losses)
        for _ in range(min(passed, _HISTORY) - 1):
            changes, losses = changes.observe(0), losses.observe(0)
        began = self.began_seconds + passed * self.interval_seconds
        return Availability(changes, losses, began, interval_seconds=self.interval_seconds)

    def changed(self, seconds: float, *, gone: int) -> Availability:
        """With one more moment at which machines came or went; ``gone`` of them went."""
        now = self.at(seconds)
        return replace(now, open_changes=now.open_changes + 1, open_losses=now.open_losses + gone)

    @property
    def changes_per_second(self) -> float:
        """What the best predictor so far foresees on average."""
        return self._rate(self.changes)

    @property
    def losses_per_second(self) -> float:
        """The same of machines that go."""
        return self._rate(self.losses)

    @property
    def undisturbed_seconds(self) -> float:
        """Until the next change, on average, and no more than what is looked ahead."""
        ahead, rate = LOOK_AHEAD * self.interval_seconds, self.changes_per_second
        return -math.expm1(-rate * ahead) / rate if rate > 0.0 else ahead

    @property
    def said(self) -> str:
        """In words: what is foreseen, and by which predictor."""
        if not self.changes.history:
            return "nothing is known yet of how often machines come and go"
        return (
            f"{3600.0 * self.changes_per_second:.3g} changes and {3600.0 * self.losses_per_second:.3g} losses an hour "
            f"foreseen, by {self.changes.best} and {self.losses.best}"
        )

    def to_json(self) -> dict[str, Any]:
        """What was seen, for a worker that joins."""
        return {
            "changes": list(self.changes.history),
            "losses": list(self.losses.history),
            "open": [self.open_changes, self.open_losses],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, interval_seconds: float = INTERVAL_SECONDS) -> Availability:
        """Inverse of :meth:`to_json`, but that an interval begins with the first look."""
        changes, losses = value["open"]
        seen = _seen(value["changes"]), _seen(value["losses"])
        return cls(*seen, None, int(changes), int(losses), interval_seconds)

    def _rate(self, board: Scoreboard) -> float:
        return fmean(board.forecast()) / self.interval_seconds if board.history else 0.0


def _seen(counts: Sequence[int]) -> Scoreboard:
    board = _board()
    for count in counts:
        board = board.observe(int(count))
    return board
