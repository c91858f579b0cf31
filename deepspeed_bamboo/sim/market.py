"""A spot market drawn from hourly probabilities (Bamboo, NSDI'23, section 6.3: the simulation study).

Every hour, each live machine is taken with that hour's removal probability at a uniform second of the hour,
and each missing slot is filled with that hour's addition probability, likewise. The draws are made in one
fixed order from one generator, hour by hour, so a run of any length needs memory for one hour only.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .clock import MILLISECONDS_PER_HOUR, MILLISECONDS_PER_SECOND
from .errors import ScenarioError
from .machines import Change, MachineEvent, ordered

__all__ = ["HourlyMarket", "hourly_events"]

_HOURS_A_DAY = 24
_SECONDS_AN_HOUR = 3_600


@dataclass(frozen=True)
class HourlyMarket:
    """The odds of a spot market.

    Attributes:
        capacity: slots, that is machines wanted at any time.
        removal_probabilities: by hour of the day, 24 of them, each in [0, 1].
        addition_probabilities: likewise; None draws each from [0, 1] uniformly, once a run.
        start_hour: hour of the day at which the run starts, 0 to 23.
        notice_seconds: how long before its end a machine is warned; 0 is never.
        zones: names given to machines in turn; empty leaves machines without a zone.
        zone_removal_probability: that within an hour all machines of a zone go at once, drawn for each zone.
    """

    capacity: int
    removal_probabilities: tuple[float, ...]
    addition_probabilities: tuple[float, ...] | None = None
    start_hour: int = 0
    notice_seconds: int = 0
    zones: tuple[str, ...] = ()
    zone_removal_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ScenarioError(f"capacity {self.capacity}: a market has at least 1 slot; give a positive number")
        _check_probabilities("removal_probabilities", self.removal_probabilities)
        if not 0.0 <= self.zone_removal_probability <= 1.0 or (self.zone_removal_probability and not self.zones):
            raise ScenarioError(
                f"zone_removal_probability {self.zone_removal_probability} with the zones {list(self.zones)}: a "
                "probability lies in [0, 1], and needs zones; give market.zones"
            )
        if self.addition_probabilities is not None:
            _check_probabilities("addition_probabilities", self.addition_probabilities)


def _check_probabilities(name: str, values: Sequence[float]) -> None:
    if len(values) != _HOURS_A_DAY:
        raise ScenarioError(f"{name} has {len(values)} values: one for each of the day's 24 hours is needed")
    for hour, value in enumerate(values):
        if not 0.0 <= value <= 1.0:
            raise ScenarioError(f"{name} at hour {hour} is {value}: a probability lies in [0, 1]")


def hourly_events(market: HourlyMarket, *, generator: random.Random, end_milliseconds: int) -> Iterator[MachineEvent]:
    """Machine events in order of time.

    Args:
        market: the odds.
        end_milliseconds: no hour that begins after it is drawn.
        generator: the only source of randomness; equal generators give equal events.
    """
    additions = market.addition_probabilities
    if additions is None:
        additions = tuple(generator.random() for _ in range(_HOURS_A_DAY))
    names = _Names(market.zones)
    initial = [names.add(0) for _ in range(market.capacity) if additions[market.start_hour] > generator.random()]
    yield from initial
    live = {event.node: event.zone for event in initial}
    for hour in range(end_milliseconds // MILLISECONDS_PER_HOUR + 1):
        of_day = (market.start_hour + hour) % _HOURS_A_DAY
        odds = _Odds(market.removal_probabilities[of_day], additions[of_day], generator)
        changes = _plan_hour(live, start=hour * MILLISECONDS_PER_HOUR, odds=odds, market=market, names=names)
        yield from ordered(changes)


class _Names:
    """Numbers the machines and gives them zones in turn."""

    def __init__(self, zones: tuple[str, ...]) -> None:
        self._zones = zones
        self._count = 0

    def add(self, at_milliseconds: int) -> MachineEvent:
        zone = self._zones[self._count % len(self._zones)] if self._zones else ""
        self._count += 1
        return MachineEvent(at_milliseconds, Change.ADD, f"node{self._count}", zone)


@dataclass(frozen=True)
class _Odds:
    """One hour's probabilities with the generator that decides them."""

    removal: float
    addition: float
    generator: random.Random

    def draw(self, probability: float) -> int | None:
        """The second of the hour at which it happens, or None if it doesn't."""
        if probability > self.generator.random():
            return self.generator.randrange(0, _SECONDS_AN_HOUR)
        return None


def _plan_hour(
    live: dict[str, str], *, start: int, odds: _Odds, market: HourlyMarket, names: _Names
) -> list[MachineEvent]:
    """Decide one hour, and bring `live` (name to zone) to the hour's end.

    Slots are refilled in order of time and never beyond the capacity; a machine added in this hour can also be
    taken in it.
    """
    drawn = [(odds.draw(odds.removal), node) for node in live]
    struck = _struck_zones(market, odds)
    earliest = ((_earlier(second, struck.get(live[node])), node) for second, node in drawn)
    removals = [(second, node) for second, node in earliest if second is not None]
    missing = market.capacity - len(live) + len(removals)
    fills = (odds.draw(odds.addition) for _ in range(missing))
    additions = [second for second in fills if second is not None]
    heapq.heapify(removals)
    heapq.heapify(additions)
    events: list[MachineEvent] = []
    added_at: dict[str, int] = {}
    while removals or additions:
        if removals and (not additions or removals[0][0] < additions[0]):
            second, node = heapq.heappop(removals)
            at = start + second * MILLISECONDS_PER_SECOND
            zone = live.pop(node)
            if market.notice_seconds:
                warned = at - market.notice_seconds * MILLISECONDS_PER_SECOND
                events.append(MachineEvent(max(warned, added_at.get(node, start)), Change.NOTICE, node, zone))
            events.append(MachineEvent(at, Change.REMOVE, node, zone))
            continue
        second = heapq.heappop(additions)
        if len(live) == market.capacity:
            continue
        added = names.add(start + second * MILLISECONDS_PER_SECOND)
        events.append(added)
        live[added.node] = added.zone
        added_at[added.node] = added.at_milliseconds
        gone, zone_gone = odds.draw(odds.removal), struck.get(added.zone)
        if zone_gone is not None and zone_gone >= second:
            gone = _earlier(None if gone is None or gone < second else gone, zone_gone)
        if gone is not None and gone >= second:
            heapq.heappush(removals, (gone, added.node))
    return events


def _struck_zones(market: HourlyMarket, odds: _Odds) -> dict[str, int]:
    """The second of the hour at which all machines of a zone go, for the zones where that happens."""
    if not market.zone_removal_probability:
        return {}  # Nothing is drawn, so that runs without it stay what they were.
    drawn = {zone: odds.draw(market.zone_removal_probability) for zone in dict.fromkeys(market.zones)}
    return {zone: second for zone, second in drawn.items() if second is not None}


def _earlier(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)
