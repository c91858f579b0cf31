"""The hourly market: bounds, order, presence, determinism."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.market import HourlyMarket, hourly_events

HOUR = 3_600_000
probabilities = st.floats(0.0, 1.0)


@given(
    capacity=st.integers(1, 30),
    removal=probabilities,
    addition=probabilities,
    notice=st.sampled_from([0, 120]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_machines_are_within_capacity_and_come_before_they_go(
    capacity: int, removal: float, addition: float, notice: int, seed: int
) -> None:
    market = HourlyMarket(capacity, (removal,) * 24, (addition,) * 24, notice_seconds=notice, zones=("a", "b"))
    live: set[str] = set()
    warned: dict[str, int] = {}
    last = 0
    for event in hourly_events(market, generator=random.Random(seed), end_milliseconds=12 * HOUR):
        assert event.at_milliseconds >= last
        last = event.at_milliseconds
        if event.change is Change.ADD:
            assert event.node not in live
            live.add(event.node)
            assert len(live) <= capacity
            assert event.zone in ("a", "b")
        elif event.change is Change.NOTICE:
            assert event.node in live
            warned[event.node] = event.at_milliseconds
        else:
            live.remove(event.node)
            if notice:
                assert 0 <= event.at_milliseconds - warned.pop(event.node) <= 1000 * notice


def test_a_seed_gives_the_same_events() -> None:
    market = HourlyMarket(20, (0.3,) * 24)
    first, second, other = (
        list(hourly_events(market, generator=random.Random(seed), end_milliseconds=9 * HOUR)) for seed in (7, 7, 8)
    )
    assert first == second
    assert first != other


def test_removals_are_as_frequent_as_asked() -> None:
    market = HourlyMarket(200, (0.25,) * 24, (1.0,) * 24)
    events = hourly_events(market, generator=random.Random(1), end_milliseconds=50 * HOUR - 1)
    removed = sum(event.change is Change.REMOVE for event in events)
    # 200 slots x 50 h x 0.25, and some of the machines added within the hour: seldom more than a fifth on top.
    assert 2_400 < removed < 3_100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, (0.1,) * 24), "capacity 0"),
        ((4, (1.5,) * 24), "removal_probabilities at hour 0 is 1.5"),
        ((4, (0.1,) * 23), "23 values"),
        ((4, (0.1,) * 24, (0.1,) * 23 + (-0.1,)), "addition_probabilities at hour 23 is -0.1"),
    ],
)
def test_wrong_odds_are_refused_with_value_and_rule(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        HourlyMarket(*arguments)  # type: ignore[arg-type]


@given(seed=st.integers(0, 1000), removal=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_a_zone_goes_as_a_whole(seed: int, removal: float) -> None:
    """Each zone is struck in each hour: at that second it has no machine, also where it had none before."""
    market = HourlyMarket(12, (removal,) * 24, (1.0,) * 24, zones=("a", "b"), zone_removal_probability=1.0)
    events = list(hourly_events(market, generator=random.Random(seed), end_milliseconds=6 * HOUR))
    present: Counter[str] = Counter(event.zone for event in events if event.at_milliseconds == 0 and is_add(event))
    later = [event for event in events if event.at_milliseconds > 0 or not is_add(event)]
    for hour in range(6):
        empty = {zone for zone in ("a", "b") if not present[zone]}
        for event in later:
            if event.at_milliseconds // HOUR == hour and event.change is not Change.NOTICE:
                present[event.zone] += 1 if is_add(event) else -1
                empty.update(zone for zone in ("a", "b") if not present[zone])
        assert empty == {"a", "b"}, f"hour {hour}"


def is_add(event: MachineEvent) -> bool:
    return event.change is Change.ADD


def test_zones_are_needed_for_losses_of_zones() -> None:
    with pytest.raises(ScenarioError, match="needs zones"):
        HourlyMarket(4, (0.1,) * 24, zone_removal_probability=0.1)
