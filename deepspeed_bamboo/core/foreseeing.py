"""What comes next, by what was seen: predictors, and the choice among them by the error that they made so far. Pure.

A predictor gets the counts of past intervals, the last one newest, and says what the next intervals will have. Parcae
(NSDI'24, section 5) predicts with ARIMA; on the published traces persistence, which expects no change, often has the
smaller error, so none is trusted without being measured. ARIMA, which needs another library, is in the simulator.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Predictor", "Scoreboard", "long_average", "moving_average", "persistence", "squared"]

Predictor = Callable[[Sequence[int], int], tuple[float, ...]]

_AVERAGED_INTERVALS = 3


def persistence(history: Sequence[int], horizon: int) -> tuple[float, ...]:
    """As many as now."""
    return (float(history[-1]),) * horizon


def moving_average(history: Sequence[int], horizon: int) -> tuple[float, ...]:
    """As many as on average over the last three intervals."""
    return (statistics.fmean(history[-_AVERAGED_INTERVALS:]),) * horizon


def long_average(history: Sequence[int], horizon: int) -> tuple[float, ...]:
    """As many as on average over all that is known."""
    return (statistics.fmean(history),) * horizon


def squared(missed: float) -> float:
    """Errors of counts that are mostly 0: by absolute ones whoever says 0 is right more often than not."""
    return missed * missed


@dataclass(frozen=True)
class Scoreboard:
    """The errors of some predictors on the history so far; observing one more interval makes the next scoreboard.

    Attributes:
        predictors: by name; the first wins a tie.
        horizon: intervals ahead that count.
        history_limit: intervals that a predictor is shown.
        penalty: what an error counts.
        history: the last of them.
        forecasts: by name, those that are not yet scored in full, oldest first.
        errors: by name, sum of penalties over all horizons.
    """

    predictors: Mapping[str, Predictor]
    horizon: int
    history_limit: int
    penalty: Callable[[float], float] = abs
    history: tuple[int, ...] = ()
    forecasts: Mapping[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def observe(self, count: int) -> Scoreboard:
        """The scoreboard one interval on: scores what was forecast for it, and forecasts from it."""
        history = (*self.history, count)[-self.history_limit :]
        errors: dict[str, float] = {}
        forecasts: dict[str, tuple[tuple[float, ...], ...]] = {}
        for name, predictor in self.predictors.items():
            waiting = self.forecasts.get(name, ())
            # The newest one foretold this interval as its first, the one before as its second, ...
            missed = (self.penalty(one[ahead] - count) for ahead, one in enumerate(reversed(waiting)))
            errors[name] = self.errors.get(name, 0.0) + sum(missed)
            forecasts[name] = (*waiting, predictor(history, self.horizon))[-self.horizon :]
        return Scoreboard(self.predictors, self.horizon, self.history_limit, self.penalty, history, forecasts, errors)

    @property
    def best(self) -> str:
        """The predictor with the smallest error so far."""
        return min(self.predictors, key=lambda name: self.errors.get(name, 0.0))

    def forecast(self) -> tuple[float, ...]:
        """The best predictor's forecast from the last observed interval."""
        return self.forecasts[self.best][-1]
