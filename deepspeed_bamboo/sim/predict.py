"""How many machines there will be: the predictors by name, ARIMA among them, and their errors on a trace.

The simple predictors, and the choice among all by the error that they made so far, are core's (core/foreseeing.py),
since the running job predicts, too.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence

from ..core.foreseeing import Predictor, Scoreboard, moving_average, persistence
from .errors import MissingExtraError, ScenarioError
from .machines import Change
from .traces import Trace

__all__ = [
    "Predictor",
    "Scoreboard",
    "arima",
    "counts_by_interval",
    "fitting_history",
    "mean_absolute_error",
    "moving_average",
    "named_predictors",
    "persistence",
    "require_statsmodels",
]

_LEAST_TO_FIT = 5


def arima(history: Sequence[int], horizon: int) -> tuple[float, ...]:
    """ARIMA(1,1,0), fitted to the given history, as in Parcae but without its corrections.

    Raises:
        MissingExtraError: statsmodels is not installed.
    """
    if len(history) < _LEAST_TO_FIT or min(history) == max(history):
        return persistence(history, horizon)
    require_statsmodels()
    from statsmodels.tsa.arima.model import ARIMA

    with warnings.catch_warnings():
        # A dozen points make statsmodels warn at almost every fit; the measured error is what counts.
        warnings.simplefilter("ignore")
        fitted = ARIMA([float(count) for count in history], order=(1, 1, 0)).fit(method="burg")
        return tuple(float(value) for value in fitted.forecast(horizon))


def require_statsmodels() -> None:
    """Raises MissingExtraError without statsmodels, which ARIMA needs; to be called before anything is computed."""
    try:
        import statsmodels.tsa.arima.model  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("statsmodels", extra="predict") from error


def named_predictors(names: Sequence[str]) -> dict[str, Predictor]:
    """The predictors of these names, in this order.

    Raises:
        ScenarioError: a name is unknown, or there is none.
    """
    known: Mapping[str, Predictor] = {"persistence": persistence, "moving-average": moving_average, "arima": arima}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ScenarioError(f"predictor {unknown[0] if unknown else ''!r} is unknown; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def fitting_history(horizon: int) -> int:
    """How many past intervals to show for a horizon, as Parcae's public code does for horizons of 5, 8 and 12."""
    return 10 if horizon < 8 else horizon


def counts_by_interval(trace: Trace, *, interval_seconds: float) -> list[int]:
    """Machines at the start of every interval of a trace, its first instant included."""
    interval = round(interval_seconds * 1000)
    counts: list[int] = []
    machines = 0
    index = 0
    for at in range(0, trace.duration_milliseconds + 1, interval):
        while index < len(trace.events) and trace.events[index].at_milliseconds <= at:
            change = trace.events[index].change
            machines += (change is Change.ADD) - (change is Change.REMOVE)
            index += 1
        counts.append(machines)
    return counts


def mean_absolute_error(counts: Sequence[int], predictor: Predictor, *, horizon: int, history: int) -> float:
    """The error in machines over all forecasts of the next `horizon` intervals that can be scored in full.

    Args:
        counts: by interval.
        predictor: shown the last `history` counts at each interval.
        horizon: how many intervals ahead; the error is the mean over them.
        history: forecasts begin when there is as much.

    Raises:
        ScenarioError: the counts are too few for a single forecast.
    """
    origins = range(history - 1, len(counts) - horizon)
    if not origins:
        raise ScenarioError(
            f"{len(counts)} intervals are too few to forecast {horizon} from {history}: give a longer trace"
        )
    errors = []
    for origin in origins:
        forecast = predictor(counts[origin - history + 1 : origin + 1], horizon)
        actual = counts[origin + 1 : origin + 1 + horizon]
        errors.append(statistics.fmean(abs(one - other) for one, other in zip(forecast, actual, strict=True)))
    return statistics.fmean(errors)
