"""Plots of results. Needs matplotlib, which the extra `plot` brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def require_matplotlib() -> None:
    """Raises MissingExtraError without matplotlib; to be called before what is to be drawn is computed."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plot") from error


def plot_policies(job: Job, *, policies: Sequence[str], seed: int, path: Path) -> None:
    """One run of each policy over time: machines, throughput, cost, value; and their values side by side.

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
    colours = _colours(len(policies))
    labels = ("machines", "samples/s", "$/h", "samples/s per $/h")
    values = []
    for policy, colour in zip(policies, colours, strict=True):
        series = RunSeries(Series(_BINS), Series(_BINS), Series(_BINS))
        result = run_one(job, policy=policy, seed=seed, series=series)
        values.append(result.value)
        until = round(result.duration_hours * MILLISECONDS_PER_HOUR)
        for axis, points in zip(axes, _curves(series, until), strict=False):
            axis.plot(*zip(*points, strict=True), label=policy, linewidth=1.0, color=colour)
    for axis, label in zip(axes, labels, strict=False):
        axis.set_ylabel(label)
        axis.set_xlabel("hours")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize="x-small", ncols=3)
    axes[4].bar(range(len(policies)), values, color=colours)
    axes[4].set_xticks(range(len(policies)), list(policies), rotation=20, ha="right")
    axes[4].set_ylabel("value")
    _save(figure, path)


def _curves(series: RunSeries, until: int) -> list[list[tuple[float, float]]]:
    """(hours, value) of machines, throughput, cost, value."""
    machines, dollars, samples = (one.averages(until) for one in (series.machines, series.dollars, series.samples))
    by_time = dict(samples)
    throughput = [(at, 1000.0 * by_time.get(at, 0.0)) for at, _ in machines]
    cost = [(at, MILLISECONDS_PER_HOUR * amount) for at, amount in dollars]
    value = [(at, rate / paid if paid else 0.0) for (at, rate), (_, paid) in zip(throughput, cost, strict=False)]
    return [[(at / MILLISECONDS_PER_HOUR, one) for at, one in curve] for curve in (machines, throughput, cost, value)]


def plot_comparison(results: Mapping[str, Sequence[Summary]], *, path: Path) -> None:
    """The value of every policy on several traces, as groups of bars.

    Args:
        results: by trace; the same policies on each.
        path: the picture.
    """
    figure, axes = _subplots(1, height=5.0)
    policies = [summary.policy for summary in next(iter(results.values()))]
    width = 0.8 / len(policies)
    colours = _colours(len(policies))
    for index, policy in enumerate(policies):
        heights = [
            next(summary.mean("value") for summary in summaries if summary.policy == policy)
            for summaries in results.values()
        ]
        places = [place + index * width for place in range(len(results))]
        axes[0].bar(places, heights, width, label=policy, color=colours[index])
    axes[0].set_xticks([place + 0.4 - width / 2 for place in range(len(results))], list(results), rotation=12)
    axes[0].set_ylabel("value: samples/s per $/h")
    axes[0].legend(fontsize="x-small", ncols=4)
    _save(figure, path)


def _subplots(count: int, *, height: float) -> tuple[Any, Sequence[Any]]:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(count, 1, squeeze=False)
    return figure, [row[0] for row in axes]


def _colours(count: int) -> list[Any]:
    """As many colours that are told apart."""
    from matplotlib import colormaps

    palette = colormaps["tab20"]
    return [palette(index % palette.N) for index in range(count)]


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: the picture can't be written ({error}); give another path") from error
