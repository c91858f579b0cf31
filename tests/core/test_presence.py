"""Machines that have gone, and machines that take no part: pure values."""

from __future__ import annotations

import math

from deepspeed_bamboo.core.presence import Departures, Idle, without_part

EIGHT = frozenset(f"i-{number}" for number in range(8))


def test_a_machine_is_gone_when_it_is_listed_as_ended_or_away_twice() -> None:
    seen = Departures().look(0.0, running=EIGHT, ended={"i-earlier"})
    assert seen.per_machine_hour == 0.0  # what ended before the first look
    ended = seen.look(60.0, running=EIGHT - {"i-0"}, ended={"i-0", "i-earlier"})
    assert ended.per_machine_hour == 1 / 7
    assert ended.look(120.0, running=EIGHT - {"i-0"}, ended={"i-0"}).gone == ended.gone  # once
    away = seen.look(60.0, running=EIGHT - {"i-0"}, ended=())
    assert away.per_machine_hour == 0.0
    assert away.look(120.0, running=EIGHT, ended=()).look(180.0, running=EIGHT, ended=()).per_machine_hour == 0.0
    assert away.look(120.0, running=EIGHT - {"i-0"}, ended=()).per_machine_hour == 1 / 7


def test_losses_count_for_an_hour_and_an_hour_is_what_they_are_counted_over() -> None:
    seen = Departures().look(0.0, running=EIGHT, ended=())
    seen = seen.look(60.0, running=(EIGHT - {"i-0"}) | {"i-8"}, ended={"i-0"})
    assert seen.per_machine_hour == 1 / 8  # and not one in a minute
    now = (EIGHT - {"i-0"}) | {"i-8"}
    assert seen.look(3600.0, running=now, ended=()).per_machine_hour == 1 / 8
    assert seen.look(3661.0, running=now, ended=()).per_machine_hour == 0.0


def test_machines_that_somebody_took_out_of_the_fleet_are_no_losses() -> None:
    seen = Departures().look(0.0, running=EIGHT, ended=()).shrunk(2)
    seen = seen.look(60.0, running=EIGHT - {"i-0"}, ended={"i-0"})
    seen = seen.look(120.0, running=EIGHT - {"i-0", "i-1", "i-2"}, ended={"i-0", "i-1", "i-2"})
    assert seen.gone == ((120.0, 1),)
    assert seen.shrunk(-3).meant == 0


def test_a_machine_takes_part_under_any_of_its_names() -> None:
    machines = {"i-0": {"i-0", "10.0.0.1", "ip-10-0-0-1"}, "i-1": {"i-1", "10.0.0.2"}, "i-2": {"i-2", "10.0.0.3"}}
    assert without_part(machines, {"ip-10-0-0-1": {"ip-10-0-0-1"}, "b": {"b", "10.0.0.2"}}) == (1, ["i-2"])
    # One node has a name of its own, and may be any machine that is not known to be another.
    assert without_part(machines, {"i-0": {"i-0"}, "b": {"b"}}) == (1, ["i-1", "i-2"])
    assert without_part(machines, {name: {name} for name in "abc"}) == (0, [])
    assert without_part(machines, {}) == (3, ["i-0", "i-1", "i-2"])


def test_a_machine_is_idle_after_so_long_without_a_break() -> None:
    seen = Idle(360.0).look(0.0, ["i-0", "i-1"])
    assert seen.long(300.0) == [] and math.isnan(seen.seconds(300.0))
    seen = seen.look(300.0, ["i-1"]).look(360.0, ["i-0", "i-1"])
    assert seen.long(360.0) == ["i-1"] and seen.seconds(420.0) == 420.0
