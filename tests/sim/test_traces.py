"""Trace and price files: formats, errors that name file, line and rule, repairs, segments, capacity."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.errors import ScenarioError, TraceError
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.predict import counts_by_interval
from deepspeed_bamboo.sim.prices import read_prices
from deepspeed_bamboo.sim.runner import run_seeds
from deepspeed_bamboo.sim.scenario import load_preset
from deepspeed_bamboo.sim.traces import Trace, capped, read_trace, segment

from .common import machines, preset_job, published_trace, recorded


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return read_trace(path, generator=random.Random(0))


def test_events_format(tmp_path: Path) -> None:
    trace = read(tmp_path, "# recorded by hand\n0,add,a\n\n60000,add,b\n60000,remove,a\n")
    assert trace.events == tuple(machines((0, "add", "a"), (60, "add", "b"), (60, "remove", "a")))
    assert trace.duration_milliseconds == 60_000


def test_zoned_format(tmp_path: Path) -> None:
    trace = read(tmp_path, "seconds,change,node,zone\n0,add,a,x\n1.5,notice,a,x\n31.5,remove,a,x\n")
    assert trace.events == tuple(machines((0, "add", "a", "x"), (1.5, "notice", "a", "x"), (31.5, "remove", "a", "x")))


def test_counts_format(tmp_path: Path) -> None:
    trace = read(tmp_path, "2021-12-11, 23:59:00, 2\n2021-12-12, 00:00:00, 3\n2021-12-12, 00:01:00, 1\n")
    assert [event.change for event in trace.events] == [Change.ADD] * 3 + [Change.REMOVE] * 2
    assert counts_by_interval(trace, interval_seconds=60) == [2, 3, 1]
    assert trace.repairs == ()


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff0,add,a\n5,remove,a\n") == read(tmp_path, "0,add,a\n5,remove,a\n")
    prices = tmp_path / "prices.csv"
    prices.write_text("\ufeffseconds,dollars_per_hour\n0,0.5\n", encoding="utf-8")
    assert read_prices(prices).at(1) == 0.5


@pytest.mark.parametrize("line", ["0,inf", "0,nan", "1e300,1", "nan,1"])
def test_prices_and_their_times_are_finite(line: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(f"seconds,dollars_per_hour\n{line}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=":2: "):
        read_prices(prices)


def test_a_trace_of_one_instant_needs_a_duration(tmp_path: Path) -> None:
    trace = read(tmp_path, "2021-12-11, 11:11:30, 55\n")
    with pytest.raises(ScenarioError, match="ends at its first instant"):
        build_job(load_preset("bert"), trace=trace)


def test_counts_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    trace = read(tmp_path, "2021-12-11, 11:00:00, 2\n2021-12-11, 11:02:00, 1\n2021-12-11, 11:01:00, 3\n")
    assert counts_by_interval(trace, interval_seconds=60) == [2, 3, 1]
    assert len(trace.repairs) == 1
    assert "1 samples out of order (lines 3)" in trace.repairs[0]


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("0,add,a\n5,add\n", 2, "malformed"),
        ("0,add,a\n99999999999999999999999,remove,a\n", 2, "more than 87600 hours"),
        ("0,add,a\n²,remove,a\n", 2, "'²' is not a whole number"),
        ("seconds,change,node,zone\n9e11,add,a,z\n", 2, "more than 87600 hours"),
        ("seconds,change,node,zone\nnan,add,a,z\n", 2, "'nan' is not a number of seconds"),
        ("2021-12-11, 11:00:00, 9999999\n", 1, "machines from 0 to 1000000"),
        ("2001-12-11, 11:00:00, 2\n2021-12-11, 11:00:00, 2\n", 2, "span more than 87600 hours"),
        ("0,add,a\n5,grow,b\n", 2, "'grow' is unknown"),
        ("-1,add,a\n", 1, "'-1' is not a whole number"),
        ("0,add,a\n1.5,remove,a\n", 2, "'1.5' is not a whole number"),
        ("10,add,a\n5,add,b\n", 2, "time goes back"),
        ("0,add,a\n1,remove,b\n", 2, "removes b, which isn't there"),
        ("0,add,a\n1,remove,a\n2,remove,a\n", 3, "removes a, which isn't there"),
        ("0,add,a\n# twice\n1,add,a\n", 3, "adds a, which is already there"),
        ("seconds,change,node,zone\n0,add,a,x\n1,remove,a,y\n", 3, "zone y"),
        ("seconds,change,node,zone\nnan,add,a,x\n", 2, "'nan' is not a number"),
        ("seconds,change,node,zone\n", 1, "no events"),
        ("2021-12-11, 11:00:00, 2\n2021-13-11, 11:00:00, 2\n", 2, "not a date and time"),
        ("2021-12-11, 11:00:00, -2\n", 1, "'-2' is not a whole number"),
        ("2021-12-11, 11:00:00\n", 1, "malformed"),
        ("", 0, "holds no events"),
    ],
)
def test_errors_name_file_line_and_rule(tmp_path: Path, text: str, line: int, rule: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{tmp_path / 'trace.csv'}" + (f":{line}: " if line else ": "))
    assert rule in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: can't be read"):
        read_trace(tmp_path / "nowhere.csv", generator=random.Random(0))


def test_a_segment_begins_with_those_that_are_there() -> None:
    trace = recorded(machines((0, "add", "a"), (10, "add", "b"), (3600, "remove", "a"), (5400, "add", "c")), hours=2)
    part = segment(trace, from_hours=0.5, to_hours=1.5)
    assert part.events == tuple(machines((0, "add", "a"), (0, "add", "b"), (1800, "remove", "a"), (3600, "add", "c")))
    assert part.duration_milliseconds == 3_600_000


def test_a_machine_that_comes_back_at_the_instant_at_which_it_goes_lives_on_under_another_name(tmp_path: Path) -> None:
    """In the order of the file: it is there again, and goes when its second life ends."""
    trace = read(tmp_path, "0,add,a\n0,add,a~2\n1000,remove,a\n1000,add,a\n5000,remove,a\n5000,add,a\n9000,remove,a\n")
    assert trace.events == tuple(
        machines(
            (0, "add", "a"), (0, "add", "a~2"), (1, "add", "a~3"), (1, "remove", "a"),
            (5, "add", "a~4"), (5, "remove", "a~3"), (9, "remove", "a~4"),
        )
    )  # fmt: skip
    for form in ("1000,remove,a\n1000,add,a\n", "", "1000,remove,a\n2000,add,a\n"):
        whole = read(tmp_path, f"0,add,a\n0,add,b\n{form}36000000,remove,b\n")
        assert counts_by_interval(whole, interval_seconds=3600)[:10] == [2] * 10
        assert len(segment(whole, from_hours=1, to_hours=2).events) == 2
        [found] = run_seeds(
            preset_job("bert", trace=whole, market__dollars_per_hour=1.0), policies=["oracle"], seeds=[1]
        )
        for name, expected in (("machine_hours", 20.0), ("cost_dollars", 20.0), ("instances", 2.0)):
            assert found.mean(name) == pytest.approx(expected, abs=0.001)


def test_one_name_in_the_zoned_form_comes_back_in_another_zone(tmp_path: Path) -> None:
    head = "seconds,change,node,zone\n0,add,a,x\n1,notice,a,x\n"
    trace = read(tmp_path, f"{head}1.0001,remove,a,x\n1.0002,add,a,y\n2,notice,a,y\n3,remove,a,y\n")
    assert trace.events[1:] == tuple(
        machines(
            (1, "notice", "a", "x"), (1.001, "add", "a~2", "y"), (1.001, "remove", "a", "x"),
            (2, "notice", "a~2", "y"), (3, "remove", "a~2", "y"),
        )
    )  # fmt: skip


def test_the_hours_of_a_segment_are_billed_at_their_own_prices(tmp_path: Path) -> None:
    trace = recorded(machines((0, "add", "a", "x"), (7200, "add", "b", "x")), hours=2)
    for head, zone in (("seconds,dollars_per_hour", ""), ("seconds,dollars_per_hour,zone", ",x")):
        lines = [f"{line}{zone}" for line in ("0,1.0", "3600,2.0", "5400,4.0")]
        (tmp_path / "prices.csv").write_text("\n".join([head, *lines]))
        for start, end, dollars in ((0.0, 1.0, 1.0), (1.0, 1.4, 0.8), (1.25, 1.75, 1.5), (1.5, 2.0, 2.0)):
            part = segment(
                segment(trace, from_hours=start / 2, to_hours=2), from_hours=start / 2, to_hours=end - start / 2
            )
            job = preset_job("bert", trace=part, market__price_history=str(tmp_path / "prices.csv"))
            [found] = run_seeds(job, policies=["oracle"], seeds=[1])
            assert found.mean("cost_dollars") == pytest.approx(dollars)


@pytest.mark.parametrize("hours", [(2.0, 1.0), (-1.0, 1.0), (5.0, 6.0), (2.0, 2.1), (1.0, 15.0)])
def test_segments_outside_the_trace_are_refused(hours: tuple[float, float]) -> None:
    with pytest.raises(ScenarioError, match="segment"):
        segment(recorded(machines((0, "add", "a")), hours=2), from_hours=hours[0], to_hours=hours[1])


@given(seed=st.integers(0, 1000), capacity=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_capped_holds_as_many_as_it_can(seed: int, capacity: int) -> None:
    generator = random.Random(seed)
    events: list[MachineEvent] = []
    live: list[str] = []
    for at in range(80):
        if live and generator.random() < 0.4:
            events.append(MachineEvent(at, Change.REMOVE, live.pop(generator.randrange(len(live)))))
        else:
            live.append(f"n{at}")
            events.append(MachineEvent(at, Change.ADD, live[-1]))
    whole = counts_by_interval(Trace(tuple(events), 79), interval_seconds=0.001)
    kept = counts_by_interval(Trace(tuple(capped(events, capacity=capacity)), 79), interval_seconds=0.001)
    assert kept == [min(count, capacity) for count in whole]


def test_the_published_traces_are_as_described() -> None:
    p3 = read_trace(published_trace("aws-p3-us-east.csv"), generator=random.Random(0))
    added = sum(event.change is Change.ADD for event in p3.events)
    assert (len(p3.events), added) == (344, 177)
    counts = counts_by_interval(p3, interval_seconds=60)
    assert (min(counts), max(counts)) == (10, 32)
    assert sum(counts) / len(counts) == pytest.approx(24.0, abs=0.05)
    gcp = read_trace(published_trace("gcp-a100-us-east1b.txt"), generator=random.Random(0))
    held = counts_by_interval(gcp, interval_seconds=60)
    assert (held[0], min(held)) == (55, 17)
    assert gcp.duration_milliseconds == pytest.approx(27 * 3_600_000, rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,1\n", "begins with the line"),
        ("seconds,dollars_per_hour\n5,1\n", ":2: the first price begins at 5.0 s"),
        ("seconds,dollars_per_hour\n0,1\n0,2\n", ":3: time 0.0 s is not after"),
        ("seconds,dollars_per_hour\n0,0\n", ":2: price 0.0"),
        ("seconds,dollars_per_hour\n0\n", ":2: '0' is malformed"),
        ("seconds,dollars_per_hour\n", "holds no prices"),
        ("seconds,dollars_per_hour,zone\n0,1,a\n5,1,b\n", ":3: the first price begins at 5.0 s"),
        ("seconds,dollars_per_hour,zone\n0,1,a\n0,1,b\n0,2,a\n", ":4: time 0.0 s is not after"),
        ("seconds,dollars_per_hour,zone\n0,1\n", ":2: '0,1' names no zone"),
        ("seconds,dollars_per_hour,zone\n0,1,a,b\n", ":2: '0,1,a,b' is malformed"),
    ],
)
def test_price_errors_name_file_line_and_rule(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        read_prices(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
