"""Machines coming and going: the events that every policy sees alike."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Change", "MachineEvent", "ordered"]


class Change(enum.IntEnum):
    """What happens to a machine. The numbers order what happens at one instant: a machine comes before it goes."""

    ADD = 1
    NOTICE = 2
    REMOVE = 3


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """One machine is granted, warned, or taken.

    Attributes:
        at_milliseconds: since the start of the run.
        change: what happens.
        node: the machine's name, never used twice in a run.
        zone: its zone; empty when the trace doesn't say.
    """

    at_milliseconds: int
    change: Change
    node: str
    zone: str = ""


def ordered(events: list[MachineEvent]) -> list[MachineEvent]:
    """The events by time, then by kind; equal ones keep their order."""
    return sorted(events, key=lambda event: (event.at_milliseconds, event.change))
