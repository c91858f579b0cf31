"""Predictors, their measured errors, and the choice by error."""

from __future__ import annotations

import builtins
import random
from collections.abc import Sequence

import pytest

from deepspeed_bamboo.sim.errors import MissingExtraError, ScenarioError
from deepspeed_bamboo.sim.predict import (
    Scoreboard,
    arima,
    counts_by_interval,
    fitting_history,
    mean_absolute_error,
    moving_average,
    named_predictors,
    persistence,
)
from deepspeed_bamboo.sim.traces import read_trace

from .common import published_trace


def test_the_simple_predictors() -> None:
    assert persistence([3, 5, 9], 2) == (9.0, 9.0)
    assert moving_average([1, 3, 5, 10], 2) == (6.0, 6.0)


def test_errors_are_means_over_all_forecasts() -> None:
    # From 1: errors 1, 2. From 2: errors 1, 1. From 3: errors 0, 1.
    error = mean_absolute_error([1, 2, 3, 3, 2], persistence, horizon=2, history=1)
    assert error == pytest.approx((1.5 + 1.0 + 0.5) / 3)


def test_too_few_counts_are_refused() -> None:
    with pytest.raises(ScenarioError, match="5 intervals are too few"):
        mean_absolute_error([1] * 5, persistence, horizon=5, history=3)


def test_persistence_on_the_p3_trace_is_as_known() -> None:
    trace = read_trace(published_trace("aws-p3-us-east.csv"), generator=random.Random(0))
    counts = counts_by_interval(trace, interval_seconds=60)
    for horizon, known in ((5, 1.26), (8, 1.76), (12, 2.31)):
        history = fitting_history(horizon)
        error = mean_absolute_error(counts, persistence, horizon=horizon, history=history)
        assert error == pytest.approx(known, abs=0.01)
        assert mean_absolute_error(counts, moving_average, horizon=horizon, history=history) > known


def test_arima_follows_a_trend() -> None:
    pytest.importorskip("statsmodels", reason="ARIMA needs the extra predict")
    rising = arima([10, 11, 12, 14, 15, 16, 18, 19, 20, 22], 3)
    assert rising[0] > 22
    assert len(rising) == 3
    assert arima([7] * 10, 4) == (7.0,) * 4


def test_arima_without_its_extra_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object, **keywords: object) -> object:
        if name.startswith("statsmodels"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install .\.\[predict\]. installs"):
        arima([1, 2, 4, 3, 5, 6], 2)


def rising(history: Sequence[int], horizon: int) -> tuple[float, ...]:
    """One more every interval."""
    return tuple(float(history[-1] + ahead) for ahead in range(1, horizon + 1))


def test_the_scoreboard_follows_the_smaller_error() -> None:
    board = Scoreboard({"persistence": persistence, "rising": rising}, horizon=3, history_limit=4)
    first = board.observe(5)
    assert first.best == "persistence"
    growing = first
    for count in (6, 7, 8, 9):
        growing = growing.observe(count)
    assert growing.best == "rising"
    assert growing.forecast() == (10.0, 11.0, 12.0)
    assert growing.history == (6, 7, 8, 9)
    # Persistence missed 6 by 1; 7 by 1 and 2; 8 and 9 by 1, 2 and 3.
    assert growing.errors == {"persistence": 1 + 3 + 6 + 6, "rising": 0}
    falling = growing
    for _ in range(8):
        falling = falling.observe(9)
    assert falling.best == "persistence"
    assert first.history == (5,)


def test_unknown_predictors_are_refused() -> None:
    with pytest.raises(ScenarioError, match="'prophet' is unknown; there are persistence, moving-average, arima"):
        named_predictors(["prophet"])
