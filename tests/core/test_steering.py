"""Which of the things that can be done at a boundary is done: pure values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.availability import INTERVAL_SECONDS, LOOK_AHEAD, Availability
from deepspeed_bamboo.core.steering import (
    MOST_WAIT_SECONDS,
    POLICIES,
    Action,
    Fixed,
    Foregone,
    Option,
    Outlook,
    Proactive,
    Standing,
    liveput,
    options_at,
)

times = st.floats(0.01, 1000.0)


FOUR, FIVE = Standing(4, 2.0), Standing(5, 1.9)


def seen(*, every_seconds: float, gone: int = 0, seconds: float = 3600.0) -> Availability:
    """Machines come or go so often."""
    availability = Availability().at(0.0)
    for number in range(1, int(seconds / every_seconds) + 1):
        availability = availability.changed(number * every_seconds, gone=gone)
    return availability.at(seconds)


def decided(availability: Availability, *, now: Standing = FOUR, then: Standing = FIVE, **over: float | bool) -> Action:
    costs = {"stays_safe": True, "waited_seconds": 0.0, "move_seconds": 5.0, "stand_by_seconds": 1.0, **over}
    options = options_at(now, then, **costs)  # type: ignore[arg-type]
    return Proactive().decide(options, Outlook(5, 4.0, availability)).action


def test_quiet_machines_are_used_and_busy_ones_wait() -> None:
    """5 % of an iteration pay for 5 s in 100 s."""
    assert decided(seen(every_seconds=600.0)) is Action.MOVE
    assert decided(seen(every_seconds=30.0)) is Action.WAIT
    assert decided(seen(every_seconds=30.0), then=Standing(5, 1.0)) is Action.MOVE


def test_nobody_waits_for_longer_than_a_minute() -> None:
    busy = seen(every_seconds=30.0)
    assert decided(busy, waited_seconds=MOST_WAIT_SECONDS) is Action.STAND_BY
    assert decided(busy, waited_seconds=MOST_WAIT_SECONDS, then=Standing(5, 1.0)) is Action.MOVE


def test_who_changes_nothing_is_taken_in_late_and_hosts_nothing() -> None:
    quiet = Availability()
    assert decided(quiet, then=Standing(4, 2.0)) is Action.WAIT
    assert decided(quiet, then=Standing(4, 2.0), waited_seconds=MOST_WAIT_SECONDS) is Action.STAND_BY


def test_what_is_safer_is_done() -> None:
    assert decided(seen(every_seconds=30.0), stays_safe=False) is Action.MOVE
    assert (
        Proactive()
        .decide(
            options_at(FOUR, FIVE, stays_safe=False, move_seconds=5.0, stand_by_seconds=1.0),
            Outlook(5, 4.0, Availability()),
        )
        .reason
        == ""
    )  # there was no choice


@given(times, times, times, st.floats(1.0, 4000.0), st.floats(0.01, 10.0), st.integers(1, 8), st.integers(0, 8))
def test_what_is_put_off_costs_at_most_twice(
    now: float, then: float, move: float, every: float, look: float, hosting: int, more: int
) -> None:
    """Whatever was foreseen and doesn't come: waiting ends once it has cost what moving costs, but for one look."""
    outlook = Outlook(hosting + more, 4.0, seen(every_seconds=every, gone=1, seconds=4000.0))
    standings = Standing(hosting, now), Standing(hosting + more, then)
    options = options_at(*standings, stays_safe=True, move_seconds=move, stand_by_seconds=1.0)
    foregone, looks = Foregone(), 0
    while True:
        seconds = looks * look
        decision = Proactive().decide(options, replace(outlook, foregone=foregone.until(seconds)))
        if decision.action is not Action.WAIT:
            break
        foregone = foregone.after(decision, seconds=seconds)
        if decision.foregone_per_second == 0.0:
            return  # to move would be worth nothing
        assert foregone.iterations < decision.patience == move / then
        assert foregone.seconds_to(decision.patience) > 0.0
        # As the simulator does, which knows when that will be.
        looks += max(1, math.floor(foregone.seconds_to(decision.patience) / look))
        if looks * look > 1e7:
            return
    if looks:
        assert decision.action is Action.MOVE and "waiting has cost" in decision.reason
        assert foregone.until(seconds) >= move / then


def test_where_losses_are_dear_workers_stand_by() -> None:
    """A loss of one that hosts nothing costs nothing; with the same iterations fewer hosts are better."""
    losing = seen(every_seconds=120.0, gone=1)
    options = [Option(Action.MOVE, 5, 2.0), Option(Action.WAIT, 4, 2.0)]
    assert Proactive().decide(options, Outlook(5, 30.0, losing)).action is Action.WAIT
    assert liveput(options[0], Outlook(5, 30.0, losing)) < liveput(options[1], Outlook(5, 30.0, losing))


def test_the_reason_has_the_figures() -> None:
    options = options_at(FOUR, FIVE, stays_safe=True, waited_seconds=3.0, move_seconds=5.0, stand_by_seconds=1.0)
    reason = Proactive().decide(options, Outlook(5, 4.0, seen(every_seconds=30.0, gone=1))).reason
    assert reason.startswith("wait: iterations expected within 30 s are wait 13.4, ")
    assert "move: 5 workers host, 1.9 s an iteration, 5 s to get there" in reason
    assert "120 changes and 120 losses an hour foreseen, by persistence and persistence" in reason


@given(
    st.integers(1, 50),
    st.integers(0, 50),
    times,
    times,
    st.booleans(),
    st.one_of(st.none(), st.floats(0.0, 200.0)),
    times,
    times,
    st.floats(1.0, 4000.0),
    st.sampled_from(sorted(POLICIES)),
)
def test_every_decision_is_one_of_the_options_and_none_is_worth_more(
    hosting: int,
    waiting: int,
    now: float,
    then: float,
    safe: bool,
    waited: float | None,
    move: float,
    stand_by: float,
    every: float,
    name: str,
) -> None:
    options = options_at(
        Standing(hosting, now),
        Standing(hosting + waiting, then),
        stays_safe=safe,
        waited_seconds=waited,
        move_seconds=move,
        stand_by_seconds=stand_by,
    )
    assert options[0].action is Action.MOVE
    outlook = Outlook(hosting + waiting, 4.0, seen(every_seconds=every, gone=1, seconds=4000.0))
    policy = POLICIES[name]()
    chosen = policy.decide(options, outlook)
    found = {option.action: liveput(option, outlook) for option in options}
    assert chosen.action in found
    if isinstance(policy, Fixed):
        assert chosen.action is Action.MOVE
    else:
        assert found[chosen.action] == max(found.values())
    if not safe:
        assert chosen.action is Action.MOVE
    if waited is not None and waited >= MOST_WAIT_SECONDS:
        assert chosen.action is not Action.WAIT
    assert policy.decide(options, outlook) == chosen


def test_the_predictor_with_the_least_error_counts() -> None:
    """A burst each hour is foreseen by the long average; a change of the rate by the newest minutes."""
    burst = Availability().at(0.0)
    for minute in range(60):
        for _ in range(20 if minute == 30 else 0):
            burst = burst.changed(60.0 * minute + 1.0, gone=1)
    assert burst.at(3600.0).losses.best != "persistence"
    steady = seen(every_seconds=20.0)
    assert steady.changes_per_second == pytest.approx(1 / 20, rel=0.05)
    assert steady.undisturbed_seconds == pytest.approx(20.0, rel=0.05)


def test_without_a_change_all_is_quiet() -> None:
    ahead = LOOK_AHEAD * INTERVAL_SECONDS
    assert Availability().undisturbed_seconds == ahead
    assert Availability().at(0.0).at(7200.0).undisturbed_seconds == ahead
    assert seen(every_seconds=20.0).at(3600.0 * 48).undisturbed_seconds == ahead  # what was before is forgotten


def test_what_was_seen_travels_to_those_who_join() -> None:
    known = seen(every_seconds=45.0, gone=1, seconds=600.0).changed(610.0, gone=2)
    taken = Availability.from_json(known.to_json()).at(5.0)  # by a clock of its own
    assert (taken.changes.history, taken.losses.history) == (known.changes.history, known.losses.history)
    assert (taken.open_changes, taken.open_losses) == (known.open_changes, known.open_losses)
    assert taken.changes_per_second == known.changes_per_second
