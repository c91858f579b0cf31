"""Losses of many machines at once, on top of what a market or a trace has happen: two to all but one go in an instant.

What spot markets do when a price or a zone changes, and what no odds of single machines give.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .clock import MILLISECONDS_PER_SECOND
from .machines import Change, MachineEvent

__all__ = ["BulkLosses", "with_bulk_losses"]

_LEAST = 2


@dataclass(frozen=True)
class BulkLosses:
    """In each interval one, at a second drawn from it, of two to all but one of the machines that are there then.

    Attributes:
        every_milliseconds: the interval.
        back_after_milliseconds: as many machines are granted in their place so long after; they boot as all do.
    """

    every_milliseconds: int
    back_after_milliseconds: int


def with_bulk_losses(
    events: Iterable[MachineEvent], bulk: BulkLosses, *, generator: random.Random, end_milliseconds: int
) -> Iterator[MachineEvent]:
    """``events`` and the bulk losses, in order of time. Needs memory for the machines that there are.

    A machine that comes in the place of a lost one has that one's fate: it goes when the lost one would have gone. One
    that would have gone meanwhile does not come back. With fewer than three machines nothing is lost at once.

    Args:
        events: in order of time.
        bulk: how often, and when machines come back.
        generator: of what is drawn. Equal generators give equal events.
        end_milliseconds: no bulk loss comes after it.
    """
    fleet = _Fleet(bulk, generator)
    for event in events:
        while fleet.next_at <= min(event.at_milliseconds, end_milliseconds):
            yield from fleet.happen()
        yield from fleet.pass_on(event)
    while fleet.next_at <= end_milliseconds:
        yield from fleet.happen()


class _Fleet:
    """The machines that are there, by the names that the events without bulk losses have for them."""

    def __init__(self, bulk: BulkLosses, generator: random.Random) -> None:
        self._bulk, self._generator = bulk, generator
        self._here: dict[str, tuple[str, str]] = {}  # name and zone now
        self._away: dict[str, str] = {}  # zone
        self._back: list[tuple[int, str]] = []
        self._count = 0
        self._interval = 0
        self._strikes_at = self._drawn()

    def _drawn(self) -> int:
        seconds = max(1, self._bulk.every_milliseconds // MILLISECONDS_PER_SECOND)
        into = self._generator.randrange(seconds) * MILLISECONDS_PER_SECOND
        at = self._interval * self._bulk.every_milliseconds + into
        self._interval += 1
        return at

    @property
    def next_at(self) -> int:
        """When the next machine comes back, or many are lost."""
        return min(self._strikes_at, self._back[0][0]) if self._back else self._strikes_at

    def happen(self) -> Iterator[MachineEvent]:
        """What is next: one comes back, or many are lost."""
        if self._back and self._back[0][0] <= self._strikes_at:
            at, name = heapq.heappop(self._back)
            zone = self._away.pop(name, None)
            if zone is not None:
                self._count += 1
                self._here[name] = f"{name}-again{self._count}", zone
                yield MachineEvent(at, Change.ADD, *self._here[name])
            return
        at, self._strikes_at = self._strikes_at, self._drawn()
        if len(self._here) <= _LEAST:
            return
        number = self._generator.randint(_LEAST, len(self._here) - 1)
        for name in self._generator.sample(list(self._here), number):
            node, zone = self._here.pop(name)
            self._away[name] = zone
            heapq.heappush(self._back, (at + self._bulk.back_after_milliseconds, name))
            yield MachineEvent(at, Change.REMOVE, node, zone)

    def pass_on(self, event: MachineEvent) -> Iterator[MachineEvent]:
        """The event, of the machine that is there in that one's place; nothing where none is."""
        if event.change is Change.ADD:
            self._here[event.node] = event.node, event.zone
            yield event
        elif event.node in self._here:
            name, zone = self._here[event.node]
            if event.change is Change.REMOVE:
                del self._here[event.node]
            yield MachineEvent(event.at_milliseconds, event.change, name, zone)
        elif event.change is Change.REMOVE:
            self._away.pop(event.node, None)
