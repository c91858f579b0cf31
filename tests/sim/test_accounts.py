"""Money, time and steps: prices, the ledger's arithmetic, series, confidence intervals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.sim.clock import to_milliseconds
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.ledger import Ledger, Mode
from deepspeed_bamboo.sim.prices import constant_price
from deepspeed_bamboo.sim.progress import Progress
from deepspeed_bamboo.sim.results import RunResult, Summary, interval_95
from deepspeed_bamboo.sim.runner import run_one
from deepspeed_bamboo.sim.series import Series
from deepspeed_bamboo.sim.traces import read_trace

from .common import machines, preset_job, recorded


def test_a_price_history_is_billed_by_its_hours(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("seconds,dollars_per_hour\n0,1.0\n1800,3.0\n", encoding="utf-8")
    trace = recorded(machines((0, "add", "a"), (900, "add", "b"), (2700, "remove", "a")), hours=1)
    job = preset_job("bert", trace=trace, market__price_history=str(tmp_path / "prices.csv"))
    result = run_one(job, policy="oracle", seed=1)
    # a: half an hour at 1 $, a quarter at 3 $. b: a quarter at 1 $, half an hour at 3 $.
    assert result.cost_dollars == pytest.approx(0.5 + 0.75 + 0.25 + 1.5)
    assert result.machine_hours == pytest.approx(1.5)
    assert result.instance_lifetime_hours == pytest.approx(0.75)


ZONED = "seconds,dollars_per_hour,zone\n0,1.0,east\n0,2.0,west\n1800,4.0,west\n"


def test_each_machine_is_billed_at_the_prices_of_its_zone(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(ZONED, encoding="utf-8")
    (tmp_path / "trace.csv").write_text(
        "seconds,change,node,zone\n0,add,a,east\n0,add,b,west\n900,add,c,west\n2700,remove,b,west\n3600,remove,a,east\n",
        encoding="utf-8",
    )
    trace = read_trace(tmp_path / "trace.csv", generator=random.Random(1))
    job = preset_job("bert", trace=trace, market__price_history=str(tmp_path / "prices.csv"))
    result = run_one(job, policy="oracle", seed=1)
    # a: an hour at 1 $. b: half an hour at 2 $, a quarter at 4 $. c: a quarter at 2 $, half an hour at 4 $.
    assert result.cost_dollars == pytest.approx(1.0 + (1.0 + 1.0) + (0.5 + 2.0))


def test_alike_prices_in_all_zones_are_one_price(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(ZONED.replace("2.0", "1.0").replace("4.0", "1.0"), encoding="utf-8")
    drawn = {"market__zones": ("east", "west"), "market__removal_probability": 0.3, "run__duration_hours": 3.0}
    costs = [
        run_one(preset_job("bert", **drawn, **price), policy="checkpoint", seed=3).cost_dollars
        for price in ({"market__price_history": str(tmp_path / "prices.csv")}, {"market__dollars_per_hour": 1.0})
    ]
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.parametrize(
    ("zones", "words"),
    [
        (("east", "south"), "no price for zone 'south'; the price history has east, west"),
        ((), "a machine without a zone"),
    ],
)
def test_a_zone_without_prices_is_refused_before_anything_runs(
    tmp_path: Path, zones: tuple[str, ...], words: str
) -> None:
    (tmp_path / "prices.csv").write_text(ZONED, encoding="utf-8")
    with pytest.raises(ScenarioError, match=words):
        preset_job("bert", market__zones=zones, market__price_history=str(tmp_path / "prices.csv"))


def progress_of(**arguments: int) -> tuple[Ledger, Progress]:
    ledger = Ledger(constant_price(1.0))
    ledger.add(0, "a")
    ledger.enter(0, Mode.RUNNING)
    return ledger, Progress(ledger, samples_per_step=10, target_steps=None, **arguments)


def test_a_step_counts_only_at_its_end() -> None:
    _, progress = progress_of()
    progress.start(0, 1_000)
    # A step that would end at the very instant of an event ends after it.
    assert progress.ends_at == 1_000
    assert progress.complete(before=3_000, single=False) == 2_000
    assert (progress.steps, progress.samples, progress.ends_at) == (2, 20, 3_000)


def test_stretching_slows_the_rest_of_the_running_step() -> None:
    _, progress = progress_of()
    progress.start(0, 1_000)
    progress.stretch(400, 1.5)
    assert progress.ends_at == 1_300
    progress.complete(before=1_301, single=True)
    assert progress.ends_at == 2_800


@given(st.integers(1, 5_000), st.integers(0, 60), st.integers(1, 20_000))
def test_a_jump_leaves_the_checkpoint_that_single_steps_leave(step: int, count: int, every: int) -> None:
    marks = []
    for single in (False, True):
        _, progress = progress_of(checkpoint_milliseconds=every)
        progress.start(0, step)
        while progress.ends_at <= step * count:
            progress.complete(before=step * count + 1, single=single)
        mark = progress.checkpoint
        marks.append((mark.steps, mark.samples, mark.running_milliseconds, pytest.approx(mark.ratio_hours)))
    assert marks[0] == marks[1]


def test_rolling_back_wastes_what_was_done_since() -> None:
    ledger, progress = progress_of(checkpoint_milliseconds=10_000)
    progress.start(0, 1_000)
    progress.complete(before=25_500, single=False)
    progress.roll_back(25_500)
    assert (progress.steps, progress.wasted_steps, progress.wasted_milliseconds) == (20, 5, 5_500)
    assert ledger.now == 25_500


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 50_000), st.floats(0, 1e6)), max_size=30))
def test_series_keep_the_total_in_few_bins(spreads: list[tuple[int, int, float]]) -> None:
    series = Series(16)
    for start, length, amount in spreads:
        series.spread(start, start + length, amount)
    end = max((start + length for start, length, _ in spreads), default=1)
    averages = series.averages(end)
    assert len(averages) <= 16
    starts = [at for at, _ in averages] + [float(end)]
    total = sum(value * (after - at) for (at, value), after in zip(averages, starts[1:], strict=True))
    assert total == pytest.approx(sum(amount for *_, amount in spreads), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (10, 2.2622), (300, 1.9679)])
def test_intervals_use_students_t(count: int, quantile: float) -> None:
    values = [random.Random(1).gauss(0, 1)] * (count - 1) + [5.0]
    mean = sum(values) / count
    deviation = (sum((value - mean) ** 2 for value in values) / (count - 1)) ** 0.5
    assert interval_95(values) == pytest.approx(quantile * deviation / count**0.5, rel=2e-3)


def test_one_seed_has_no_interval() -> None:
    assert interval_95([3.0]) is None
    result = run_one(preset_job("bert", run__duration_hours=1.0), policy="bamboo", seed=1)
    field = Summary("bamboo", (result,)).as_json()["value"]
    assert field == {"mean": result.value, "ci95": None, "p5": None, "p95": None}


def test_windows_and_definitions_of_value() -> None:
    trace = recorded(machines(*((0.0, "add", f"n{index}") for index in range(12))), hours=1)

    def run(window: str, value: str) -> RunResult:
        job = preset_job("bert", trace=trace, run__window=window, run__value=value)
        return run_one(job, policy="bamboo", seed=1)

    wall, training = run("wall", "ratio_of_means"), run("training", "mean_of_ratios")
    assert wall.throughput_samples_per_second == pytest.approx(wall.samples / 3600)
    assert training.throughput_samples_per_second == pytest.approx(264 / 4.31, rel=1e-6)
    assert training.value == training.value_mean_of_ratios == pytest.approx(264 / 4.31 / (12 * 0.91), rel=1e-6)
    assert wall.value == wall.value_ratio_of_means < training.value


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.0, 0), (0.1 + 0.2, 300), (0.0001, 1), (2.39, 2390)])
def test_waits_are_never_rounded_away(seconds: float, milliseconds: int) -> None:
    assert to_milliseconds(seconds) == milliseconds
