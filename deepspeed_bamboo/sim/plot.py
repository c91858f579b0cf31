"""Plots of results. Needs matplotlib, which the extra `plot` brings."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from .clock import MILLISECONDS_PER_HOUR
from .errors import MissingExtraError, ScenarioError
from .jobs import Job
from .ledger import RunSeries
from .results import Summary
from .runner import run_one
from .series import Series

__all__ = ["plot_comparison", "plot_policies", "require_matplotlib"]

_BINS = 240
_OWN, _BOUND = "deepspeed-bamboo", "oracle"
_STRONG, _FAINT = "crimson", "lightgrey"


def require_matplotlib() -> None:
    """Raises MissingExtraError without matplotlib; to be called before what is to be drawn is computed."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plot") from error


def plot_policies(job: Job, *, policies: Sequence[str], seed: int, path: Path) -> None:
    """One run of each policy over time: machines, throughput, cost, value; and their values side by side.

    The best of this project's modes, the best rival and the oracle are labelled; the others are in grey.

    Args:
        job: what to run.
        policies: some of available_policies.
        seed: of the run that is drawn.
        path: the picture; its ending says the format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ScenarioError: the picture can't be written.
    """
    figure, axes = _subplots(5, height=14.0)
    labels = ("machines", "samples/s", "$/h", "samples/s per $/h")
    runs = []
    for policy in policies:
        series = RunSeries(Series(_BINS), Series(_BINS), Series(_BINS))
        runs.append((policy, run_one(job, policy=policy, seed=seed, series=series), series))
    shown = _told_apart([(policy, result.value) for policy, result, _ in runs])
    for policy, result, series in runs:
        until = round(result.duration_hours * MILLISECONDS_PER_HOUR)
        for axis, points in zip(axes, _curves(series, until), strict=False):
            axis.plot(*zip(*points, strict=True), **_line_of(policy, shown))
            if policy in shown and axis in (axes[1], axes[3]):  # The others are alike for all.
                axis.annotate(
                    policy, points[-1], xytext=(4, 0), textcoords="offset points", fontsize="x-small",
                    color=_colour_of(policy, shown),
                )  # fmt: skip
    for axis, label in zip(axes, labels, strict=False):
        axis.set_ylabel(label)
        axis.set_xlabel("hours")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.12)
    _bars(axes[4], [(policy, result.value, None) for policy, result, _ in runs], shown)
    _save(figure, path)


def _told_apart(values: Sequence[tuple[str, float]]) -> frozenset[str]:
    """The few policies whose lines are labelled: the best of this project's, the best rival, and the bound."""
    own = [(value, policy) for policy, value in values if policy.startswith(_OWN)]
    rivals = [(value, policy) for policy, value in values if not policy.startswith(_OWN) and policy != _BOUND]
    return frozenset([*(max(group)[1] for group in (own, rivals) if group), _BOUND])


def _colour_of(policy: str, shown: Container[str]) -> str:
    if policy not in shown:
        return _FAINT
    if policy == _BOUND:
        return "black"
    return _STRONG if policy.startswith(_OWN) else "tab:blue"


def _line_of(policy: str, shown: Container[str]) -> dict[str, Any]:
    own = policy in shown and policy.startswith(_OWN)
    return {
        "color": _colour_of(policy, shown),
        "linewidth": 2.0 if own else 1.0 if policy in shown else 0.6,
        "linestyle": "--" if policy == _BOUND else "-",
        "zorder": 3 if own else 2 if policy in shown else 1,
    }


def _bars(axis: Any, values: Sequence[tuple[str, float, tuple[float, float] | None]], shown: Container[str]) -> None:
    """Bars from the least to the most, each with its name and value; with where nine of ten runs lie, if known."""
    ordered = sorted(values, key=lambda one: one[1])
    places = range(len(ordered))
    bars = axis.barh(
        places, [value for _, value, _ in ordered], color=[_colour_of(name, shown) for name, *_ in ordered]
    )
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize="x-small")
    for place, (_, _, band) in zip(places, ordered, strict=True):
        if band is not None:
            axis.plot(band, (place, place), color="black", linewidth=1.0)
    axis.set_yticks(places, [name for name, *_ in ordered], fontsize="x-small")
    axis.set_xlabel("value: samples/s per $/h")


def _curves(series: RunSeries, until: int) -> list[list[tuple[float, float]]]:
    """(hours, value) of machines, throughput, cost, value."""
    machines, dollars, samples = (one.averages(until) for one in (series.machines, series.dollars, series.samples))
    by_time = dict(samples)
    throughput = [(at, 1000.0 * by_time.get(at, 0.0)) for at, _ in machines]
    cost = [(at, MILLISECONDS_PER_HOUR * amount) for at, amount in dollars]
    value = [(at, rate / paid if paid else 0.0) for (at, rate), (_, paid) in zip(throughput, cost, strict=False)]
    return [[(at / MILLISECONDS_PER_HOUR, one) for at, one in curve] for curve in (machines, throughput, cost, value)]


def plot_comparison(results: Mapping[str, Sequence[Summary]], *, path: Path) -> None:
    """The value of every policy on several traces, bars below one another.

    Args:
        results: by trace; the same policies on each.
        path: the picture.
    """
    figure, axes = _subplots(len(results), height=2.6 * len(results))
    for axis, (trace, summaries) in zip(axes, results.items(), strict=True):
        shown = _told_apart([(summary.policy, summary.mean("value")) for summary in summaries])
        _bars(axis, [(one.policy, one.mean("value"), one.spread("value")) for one in summaries], shown)
        axis.set_title(trace, loc="left", fontsize="small")
    _save(figure, path)


def _subplots(count: int, *, height: float) -> tuple[Any, Sequence[Any]]:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(count, 1, squeeze=False)
    return figure, [row[0] for row in axes]


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: the picture can't be written ({error}); give another path") from error
