"""Losses of two to all but one machines at once: what happens to machines, what this project's policy survives."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.sim.bulk import BulkLosses, with_bulk_losses
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.market import HourlyMarket, hourly_events
from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.runner import run_one

from .common import REPOSITORY, machines, preset_job, recorded

HOUR, MINUTE = 3_600_000, 60_000


def events_of(seed: int, *, capacity: int, removal: float, every: int, back: int) -> list[MachineEvent]:
    market = HourlyMarket(capacity, (removal,) * 24, (0.7,) * 24, notice_seconds=60, zones=("a", "b"))
    drawn = hourly_events(market, generator=random.Random(seed), end_milliseconds=6 * HOUR)
    bulk = BulkLosses(every * MINUTE, back * MINUTE)
    return list(with_bulk_losses(drawn, bulk, generator=random.Random(f"bulk {seed}"), end_milliseconds=6 * HOUR))


@given(
    seed=st.integers(0, 10_000),
    capacity=st.integers(1, 20),
    removal=st.floats(0.0, 0.6),
    every=st.integers(2, 30),
    back=st.integers(0, 60),
)
@settings(max_examples=60, deadline=None)
def test_machines_come_before_they_go_and_somebody_is_left(
    seed: int, capacity: int, removal: float, every: int, back: int
) -> None:
    events = events_of(seed, capacity=capacity, removal=removal, every=every, back=back)
    assert events == events_of(seed, capacity=capacity, removal=removal, every=every, back=back)
    live: set[str] = set()
    known: set[str] = set()
    last = 0
    for event in events:
        assert event.at_milliseconds >= last
        last = event.at_milliseconds
        if event.change is Change.ADD:
            assert event.node not in known, "a name is never used twice"
            known.add(event.node)
            live.add(event.node)
            assert len(live) <= capacity
        else:
            assert event.node in live
            live -= {event.node} if event.change is Change.REMOVE else set()


@given(seed=st.integers(0, 1000), capacity=st.integers(3, 30))
@settings(max_examples=40, deadline=None)
def test_in_each_interval_two_to_all_but_one_go_and_as_many_come_back(seed: int, capacity: int) -> None:
    first = machines(*((0.0, "add", f"n{index}") for index in range(capacity)))
    bulk = BulkLosses(10 * MINUTE, 1 * MINUTE)
    events = list(with_bulk_losses(first, bulk, generator=random.Random(seed), end_milliseconds=2 * HOUR - 2 * MINUTE))
    lost = [event for event in events if event.change is Change.REMOVE]
    by_moment = [len(list(same)) for _, same in itertools.groupby(lost, lambda event: event.at_milliseconds)]
    intervals = [event.at_milliseconds // (10 * MINUTE) for event in lost]
    assert len(set(intervals)) == len(by_moment) >= 10
    # Before those lost last are back again fewer are there.
    assert all(number < capacity for number in by_moment) and max(by_moment) >= 2
    assert len([event for event in events if event.change is Change.ADD]) <= capacity + len(lost)


def test_without_them_runs_are_what_they_were() -> None:
    small: dict[str, Any] = {"policies__live__pipelines": 2, "policies__live__stages": 4, "run__duration_hours": 3.0}
    job = preset_job("bert", **small)
    assert job.scenario.market.bulk_minutes is None
    with_them = preset_job("bert", market__bulk_minutes=10.0, **small)
    one, other = (run_one(found, policy="deepspeed-bamboo", seed=2) for found in (job, with_them))
    assert (one.back_to_memory, one.back_to_store) == (0, 0)
    assert other.preemptions > one.preemptions + 18


def lose(
    *gone: str, copies: int, memory_copies: int = 1, of: int = 4, state_bytes: float = 1e12, **over: Any
) -> RunResult:
    """A pipeline of four stages on four workers, of which some are lost at once after half an hour."""
    changes = [(0.0, "add", f"n{index}") for index in range(of)] + [(1800.0, "remove", node) for node in gone]
    job = preset_job(
        "bert",
        trace=recorded(machines(*changes), hours=1.0),
        policies__live__pipelines=1,
        policies__live__stages=4,
        policies__live__state_memory_bytes=state_bytes,
        policies__live__fatal="in-place",
        policies__live__copies=copies,
        policies__live__memory_copies=memory_copies,
        **over,
    )
    return run_one(job, policy="deepspeed-bamboo", seed=1)


PAIRS = list(itertools.combinations(["n0", "n1", "n2", "n3"], 2))


def test_with_second_shadows_any_two_of_four_go_without_a_step_done_again() -> None:
    for pair in PAIRS:
        found = lose(*pair, copies=2)
        assert (found.failovers, found.fatal_losses, found.wasted_steps) == (1, 0, 0), pair


def test_with_one_shadow_neighbours_go_back_to_memory_and_others_go_on() -> None:
    found = [lose(*pair, copies=1) for pair in PAIRS]
    fatal = [result for result in found if result.fatal_losses]
    # Stages i and i + 1 of four, cyclically: each is the other's shadow's holder in one of the two directions.
    assert len(fatal) == 4 and all(result.back_to_memory == 1 for result in fatal)
    # At most the steps of an interval, and the one in flight.
    assert all(result.wasted_hours <= (10 + 2 * 3600 * result.useful_hours / result.steps) / 3600 for result in fatal)
    assert all(result.wasted_steps == 0 for result in found if not result.fatal_losses)


@pytest.mark.parametrize(("copies", "memory_copies", "source"), [(1, 1, "store"), (1, 2, "memory"), (2, 1, "memory")])
def test_all_but_one_go_back_to_memory_where_everybody_has_a_copy(copies: int, memory_copies: int, source: str) -> None:
    found = lose("n0", "n1", "n2", copies=copies, memory_copies=memory_copies)
    assert found.fatal_losses == 1
    assert (found.back_to_memory, found.back_to_store) == ((1, 0) if source == "memory" else (0, 1))


def test_second_shadows_cost_time_and_memory() -> None:
    one, two = (lose(copies=copies, policies__live__second_overhead=0.04) for copies in (1, 2))
    assert two.useful_hours == pytest.approx(one.useful_hours * 1.08 / 1.12, rel=1e-3)
    assert two.samples < one.samples
    # Two workers have room for two coordinates and their shadows each, not for two and their second shadows, too.
    enough, too_little = (lose(copies=copies, of=2, state_bytes=4.5 * 340_000_000 * 16 / 4) for copies in (1, 2))
    assert enough.idle_hours < 0.1 and too_little.samples == 0


def test_second_shadows_of_a_grid_too_large_for_plans_are_refused() -> None:
    job = preset_job("bert", policies__live__copies=2, policies__live__plans=False, run__duration_hours=1.0)
    with pytest.raises(ScenarioError, match="copies 2 is simulated by the engine's own plans alone"):
        run_one(job, policy="deepspeed-bamboo", seed=1)


SCENARIO = REPOSITORY / "configs" / "sim" / "bulk-losses.json"


def outcome(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["simulate", "--scenario", str(SCENARIO), "--seeds", "3", "--json", "-", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["bulk_losses"][0]
    return found


def test_nineteen_twentieths_of_the_time_stay_useful(capsys: pytest.CaptureFixture[str]) -> None:
    """At one bulk loss in ten minutes, by measured costs; much of what is lost at more is the workers' absence."""
    found = outcome(capsys)
    assert found["bulk_minutes"] == 10 and found["useful_time"] >= 0.95
    assert found["back_to_memory"] > 10 * found["started_again"] and found["redone_steps"] > 0
    often = outcome(capsys, "--bulk-minutes", "2")
    assert often["useful_time"] < found["useful_time"] and often["samples"] < found["samples"] < 1.0


def test_what_is_said_of_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "--scenario", str(SCENARIO), "--seeds", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 to all but one lost at once in each 10 minutes: useful time 0.9" in text
    assert "of these the scenario says: measured: scripts/bulk_losses.py" in text
    assert "of bulk-losses.profile.json, which a job has measured, only its times are read here, and" in text
    assert main(["simulate", "--preset", "bert", "--duration-hours", "1", "--policy", "deepspeed-bamboo"]) == 0
    assert "useful time" not in capsys.readouterr().out
