"""Which machines of a fleet have gone, and which ones take no part in its job, from one look to the next. Pure.

A machine has many names: its cloud's, its address, its host name. A job calls it by one of them, or by another that
somebody gave it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Departures", "Idle", "without_part"]

_COUNTED_SECONDS = 3600.0


@dataclass(frozen=True)
class Departures:
    """Machines that went within the last hour. Seconds are of any clock that only advances.

    A machine that is listed as ended has gone. One that is not listed at all has gone if it is away in two looks
    following each other, since a list may be short once.

    Attributes:
        there: machines that ran at the last look.
        away: those that ran at the look before, and were not listed at the last one.
        gone: when machines went, and how many.
        meant: how many were taken out of the fleet by somebody, and have yet to go. They are no losses.
    """

    there: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    gone: tuple[tuple[float, int], ...] = ()
    meant: int = 0

    def look(self, seconds: float, *, running: Collection[str], ended: Collection[str]) -> Departures:
        """After one more look, which saw these."""
        known, running, ended = self.there | self.away, frozenset(running), frozenset(ended)
        left = len((known & ended) | (self.away - running))
        meant = min(left, self.meant)
        lost = ((seconds, left - meant),) if left > meant else ()
        recent = tuple(one for one in (*self.gone, *lost) if seconds - one[0] < _COUNTED_SECONDS)
        return Departures(running, self.there - running - ended, recent, self.meant - meant)

    def shrunk(self, machines: int) -> Departures:
        """Somebody has asked for so many machines fewer, so that many may go."""
        return replace(self, meant=self.meant + max(0, machines))

    @property
    def per_machine_hour(self) -> float:
        """Losses of a machine in an hour: of the last one, the time before the first look counted as without any."""
        return sum(count for _, count in self.gone) / max(1, len(self.there))


def without_part(machines: Mapping[str, Iterable[str]], nodes: Mapping[str, Iterable[str]]) -> tuple[int, list[str]]:
    """How many machines take no part in a job, and which ones that may be.

    Args:
        machines: that run, and by which names each is known.
        nodes: of the job, and by which names each is known.

    A node that is none of the machines by any name may be any of them.
    """
    names = {name for known in nodes.values() for name in known}
    unknown = sorted(machine for machine, known in machines.items() if names.isdisjoint(known))
    known_names = {name for known in machines.values() for name in known}
    strange = sum(known_names.isdisjoint(known) for known in nodes.values())
    count = max(0, len(unknown) - strange)
    return count, unknown if count else []


@dataclass(frozen=True)
class Idle:
    """Machines that run and have taken no part for long.

    Attributes:
        after_seconds: for how long, until that is worth a line: a machine boots, and a job starts anew.
        since: when each was first seen without a part.
    """

    after_seconds: float
    since: Mapping[str, float] = field(default_factory=dict)

    def look(self, seconds: float, candidates: Iterable[str]) -> Idle:
        """After one more look, at which ``candidates`` took no part."""
        return replace(self, since={machine: self.since.get(machine, seconds) for machine in candidates})

    def long(self, seconds: float) -> list[str]:
        """Those that have been so for long enough."""
        return sorted(name for name, since in self.since.items() if seconds - since >= self.after_seconds)

    def seconds(self, now: float) -> float:
        """For how long at least all of :meth:`long` have been so."""
        return min((now - self.since[name] for name in self.long(now)), default=math.nan)
