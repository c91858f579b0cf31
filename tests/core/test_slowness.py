"""Who is found slow, in series recorded on two loaded cores and in simulated ones."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.slowness import DATA, SCRIPT, Delays, Slowness

WORKERS = ("w0", "w1", "w2", "w3")
RECORDED = Path(__file__).with_name("recorded_paces.txt")
"""By iteration the logarithms of what the passes of four workers took, on two cores that others used too: 498
iterations of 90 ms, an empty line, and 498 of 20 ms, in which single stalls are longer than the iteration."""

Series = list[list[float]]


def recorded(number: int) -> Series:
    part = RECORDED.read_text(encoding="utf-8").split("\n\n")[number]
    return [[float(value) for value in line.split()] for line in part.splitlines()]


def found(series: Series, *, slow: str = "", since: int = 0, times: float = 2.0) -> list[tuple[int, str]]:
    """Who is found slow newly, and after which iteration; ``slow``'s passes take longer from ``since`` on."""
    seen: list[tuple[int, str]] = []
    slowness = Slowness()
    for iteration, paces in enumerate(series):
        ratios = {
            worker: math.exp(pace) * (times if worker == slow and iteration >= since else 1.0)
            for worker, pace in zip(WORKERS, paces, strict=False)
        }
        before, slowness = slowness.speeds, slowness.after(ratios, members=WORKERS)
        seen += [(iteration, worker) for worker in slowness.speeds.keys() - before.keys()]
    return seen


@pytest.mark.parametrize("number", [0, 1])
def test_nobody_is_found_in_what_was_recorded_of_an_undisturbed_job(number: int) -> None:
    assert found(recorded(number)) == []


@pytest.mark.parametrize("number", [0, 1])
def test_nobody_is_found_where_a_job_begins_amid_what_was_recorded(number: int) -> None:
    series = recorded(number)
    assert [begin for begin in range(0, len(series) - 30) if found(series[begin : begin + 30])] == []


@settings(max_examples=30, deadline=None)
@given(since=st.integers(40, 440), worker=st.sampled_from(WORKERS))
def test_half_the_speed_is_found_within_five_iterations_of_what_was_recorded(since: int, worker: str) -> None:
    begin = max(0, since - 100)
    seen = found(recorded(0)[begin : since + 10], slow=worker, since=since - begin)
    assert [who for _, who in seen] == [worker] and begin + seen[0][0] <= since + 4


@settings(max_examples=20, deadline=None)
@given(since=st.integers(60, 430), worker=st.sampled_from(WORKERS))
def test_where_stalls_are_longer_than_an_iteration_still_nobody_else_is_found(since: int, worker: str) -> None:
    begin = max(0, since - 100)
    seen = found(recorded(1)[begin : since + 40], slow=worker, since=since - begin)
    assert {who for _, who in seen} <= {worker}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(2, 4),
    noise=st.sampled_from([(0.0, 5), (0.04, 5), (0.08, 5), (0.1, 12)]),
)
def test_half_the_speed_is_found_and_nobody_else(seed: int, workers: int, noise: tuple[float, int]) -> None:
    """With iterations that take twice as long for all, and noise: where it is wide, five iterations prove little."""
    draw = random.Random(seed)
    spread, within = noise
    series = []
    for _ in range(80):
        common = draw.choice([0.0, 0.0, 0.7])
        series.append([common + draw.gauss(0.0, spread) for _ in range(workers)])
    assert found(series) == []
    seen = found(series, slow="w1", since=50)
    assert [who for _, who in seen] == ["w1"] and 50 <= seen[0][0] < 50 + within


@settings(max_examples=30, deadline=None)
@given(workers=st.integers(1, 4), factor=st.floats(0.01, 100.0))
def test_what_is_slow_for_all_names_nobody(workers: int, factor: float) -> None:
    assert found([[0.0] * workers] * 20 + [[math.log(factor)] * workers] * 20) == []


def test_a_slow_worker_that_was_relieved_of_everything_may_show_again_what_it_can() -> None:
    slowness = Slowness()
    for iteration in range(50):
        slowness = slowness.after({w: 2.0 if w == "w1" and iteration >= 40 else 1.0 for w in WORKERS}, members=WORKERS)
    assert set(slowness.speeds) == {"w1"}
    others = {worker: 1.0 for worker in WORKERS if worker != "w1"}
    for _ in range(199):
        slowness = slowness.after(others, members=WORKERS)
    assert set(slowness.speeds) == {"w1"}
    slowness = slowness.after(others, members=WORKERS)
    assert not slowness.speeds
    for _ in range(5):
        slowness = slowness.after({**others, "w1": 2.0}, members=WORKERS)
    assert set(slowness.speeds) == {"w1"}, "still slow: found again as soon as the first time"


def test_a_script_and_a_data_loader_are_named_and_forgiven() -> None:
    delays, named = Delays(), []
    for iteration in range(20):
        long = 0.1 if 5 <= iteration < 12 else 0.0
        beside = {
            "w0": {DATA: 0.002, SCRIPT: 0.001},
            "w1": {DATA: 0.002 + long, SCRIPT: 0.001},
            "w2": {DATA: 0.0, SCRIPT: 0.001 + long},
        }
        delays = delays.after(beside, passes_seconds=0.2, members=("w0", "w1", "w2"))
        named.append(set(delays.found))
    assert named[7] == set() and named[8] == named[12] == {("w1", DATA), ("w2", SCRIPT)} and named[-1] == set()
    assert delays.after({}, passes_seconds=0.2, members=("w0",)).recent.keys() == {("w0", DATA), ("w0", SCRIPT)}


def test_what_takes_all_workers_alike_or_next_to_nothing_names_nobody() -> None:
    delays = Delays()
    for _ in range(10):
        beside = {worker: {DATA: 0.5, SCRIPT: 0.015 * (worker == "w1")} for worker in WORKERS}
        delays = delays.after(beside, passes_seconds=0.02, members=WORKERS)
    assert not delays.found
