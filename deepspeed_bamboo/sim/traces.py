"""Trace files: three formats in, one tuple of machine events out.

Formats, told apart by their first line that is neither empty nor a comment (#):

    events   0,add,node1                         milliseconds, add or remove, node
    counts   2021-12-11, 11:11:30, 55            date, time of day, machines held
    zoned    seconds,change,node,zone            this header, then for example
             90.5,notice,node7,us-east-1a        seconds, add, notice or remove, node, zone

`counts` says how many machines there are, not which: the ones that go are drawn from the given generator.
Its samples may be out of order, which is repaired by sorting; in the two others it is an error.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from ..text_files import UnreadableError, text_of
from .clock import LONGEST_HOURS, LONGEST_MILLISECONDS, MILLISECONDS_PER_HOUR, MILLISECONDS_PER_SECOND, to_milliseconds
from .errors import ScenarioError, TraceError
from .machines import Change, MachineEvent

__all__ = ["Trace", "capped", "read_trace", "segment"]

_ZONED_HEADER = "seconds,change,node,zone"
_CHANGES = {"add": Change.ADD, "notice": Change.NOTICE, "remove": Change.REMOVE}


_TOO_LATE = f"more than {LONGEST_HOURS} hours (10 years) after the start; correct it, or cut the trace"
_MOST_DIGITS = 18
_MOST_MACHINES = 1_000_000


def _is_whole(text: str) -> bool:
    """Plain digits only: str.isdigit also takes characters that int does not."""
    return text.isascii() and text.isdigit()


@dataclass(frozen=True)
class Trace:
    """Recorded machines.

    Attributes:
        events: in order of time; at one instant, in the file's order but additions first.
        duration_milliseconds: to the last line.
        repairs: what had to be put right, in words; empty for a clean file.
        begins_at_milliseconds: how long after the recording's beginning time 0 is: above 0 for a segment.
    """

    events: tuple[MachineEvent, ...]
    duration_milliseconds: int
    repairs: tuple[str, ...] = ()
    begins_at_milliseconds: int = 0


@dataclass(frozen=True)
class _Line:
    """A line with where it stands, so that an error can say it."""

    path: Path
    number: int
    text: str

    def fields(self, *, count: int, form: str) -> list[str]:
        found = [field.strip() for field in self.text.split(",")]
        if len(found) != count or not all(found):
            raise self.error(f"{self.text!r} is malformed: a line is `{form}`; correct or remove it")
        return found

    def error(self, rule: str) -> TraceError:
        return TraceError(self.path, line=self.number, rule=rule)


def read_trace(path: Path | str, *, generator: random.Random) -> Trace:
    """Read a trace file of any of the three formats.

    Args:
        path: the file.
        generator: picks the machines that go in a `counts` file; unused by the others.

    Raises:
        TraceError: a line breaks a rule; says file, line and rule.
    """
    path = Path(path)
    try:
        text = text_of(path)
    except UnreadableError as error:
        raise TraceError(path, line=0, rule=f"{error}; give the path of a trace") from error
    lines = [
        _Line(path, number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise TraceError(path, line=0, rule="holds no events; a trace has at least one line")
    if lines[0].text.replace(" ", "") == _ZONED_HEADER:
        if len(lines) == 1:
            raise lines[0].error("holds no events; the header is followed by at least one line")
        return _from_events(lines[1:], _zoned_event)
    if lines[0].text[:4].isdigit() and "-" in lines[0].text.split(",", maxsplit=1)[0]:
        return _from_counts(lines, generator)
    return _from_events(lines, _plain_event)


def _plain_event(line: _Line) -> MachineEvent:
    at, change, node = line.fields(count=3, form="milliseconds,add|remove,node")
    if not _is_whole(at):
        raise line.error(f"time {at!r} is not a whole number of milliseconds, 0 or more; correct it")
    if len(at) > _MOST_DIGITS or int(at) > LONGEST_MILLISECONDS:
        raise line.error(f"time {at} ms is {_TOO_LATE}")
    if change not in ("add", "remove"):
        raise line.error(f"change {change!r} is unknown: it is add or remove")
    return MachineEvent(int(at), _CHANGES[change], node)


def _zoned_event(line: _Line) -> MachineEvent:
    at, change, node, zone = line.fields(count=4, form=_ZONED_HEADER)
    try:
        seconds = float(at)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0.0:
        raise line.error(f"time {at!r} is not a number of seconds, 0 or more; correct it")
    if seconds > LONGEST_MILLISECONDS / MILLISECONDS_PER_SECOND:
        raise line.error(f"time {at} s is {_TOO_LATE}")
    if change not in _CHANGES:
        raise line.error(f"change {change!r} is unknown: it is one of {', '.join(_CHANGES)}")
    return MachineEvent(to_milliseconds(seconds), _CHANGES[change], node, zone)


def _from_events(lines: list[_Line], parse: Callable[[_Line], MachineEvent]) -> Trace:
    events: list[MachineEvent] = []
    for line in lines:
        event = parse(line)
        if events and event.at_milliseconds < events[-1].at_milliseconds:
            raise line.error(
                f"time goes back, from {events[-1].at_milliseconds} ms to {event.at_milliseconds} ms: "
                "events stand in order of time; sort the file"
            )
        events.append(event)
    _check_presence(lines, events)
    events = _named_apart(events)
    in_order = sorted(range(len(events)), key=lambda index: (events[index].at_milliseconds, events[index].change))
    return Trace(tuple(events[index] for index in in_order), events[-1].at_milliseconds)


def _check_presence(lines: list[_Line], events: list[MachineEvent]) -> None:
    """Only a machine that isn't there comes, only one that is there is warned or goes. In the file's order."""
    live: dict[str, str] = {}
    for line, event in zip(lines, events, strict=True):
        there = event.node in live
        if event.change is Change.ADD:
            if there:
                raise line.error(f"adds {event.node}, which is already there; remove it first or use another name")
            live[event.node] = event.zone
            continue
        verb = "removes" if event.change is Change.REMOVE else "warns"
        if not there:
            raise line.error(f"{verb} {event.node}, which isn't there; add it first or correct the name")
        if live[event.node] != event.zone:
            raise line.error(f"{verb} {event.node} in zone {event.zone}, but it was added in {live[event.node]}")
        if event.change is Change.REMOVE:
            del live[event.node]


def _named_apart(events: list[MachineEvent]) -> list[MachineEvent]:
    """A machine that comes back at the instant at which it goes has another name from then on: additions come first,
    so it would go after it has come.
    """
    taken = {event.node for event in events}
    now: dict[str, str] = {}
    gone_at: dict[str, int] = {}
    named = []
    for event in events:
        node = event.node
        if event.change is Change.ADD and gone_at.get(node) == event.at_milliseconds:
            now[node] = next(name for n in itertools.count(2) if (name := f"{node}~{n}") not in taken)
            taken.add(now[node])
        if event.change is Change.REMOVE:
            gone_at[node] = event.at_milliseconds
        named.append(replace(event, node=now.get(node, node)))
    return named


def _from_counts(lines: list[_Line], generator: random.Random) -> Trace:
    samples: list[tuple[datetime, int, _Line]] = []
    for line in lines:
        day, time, count = line.fields(count=3, form="YYYY-MM-DD, HH:MM:SS, count")
        try:
            moment = datetime.strptime(f"{day} {time}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise line.error(f"{day}, {time} is not a date and time YYYY-MM-DD, HH:MM:SS; correct it") from None
        if not _is_whole(count) or len(count) > _MOST_DIGITS or int(count) > _MOST_MACHINES:
            raise line.error(
                f"count {count!r} is not a whole number of machines from 0 to {_MOST_MACHINES}; correct it"
            )
        samples.append((moment, int(count), line))
    repairs = _order_repair(samples)
    samples.sort(key=lambda sample: sample[0])
    start = samples[0][0]
    if (samples[-1][0] - start).total_seconds() > LONGEST_MILLISECONDS / MILLISECONDS_PER_SECOND:
        raise samples[-1][2].error(f"the samples span more than {LONGEST_HOURS} hours (10 years); correct the dates")
    events: list[MachineEvent] = []
    live: list[str] = []
    named = 0
    for moment, held, _ in samples:
        at = round((moment - start).total_seconds() * 1000)
        while len(live) < held:
            named += 1
            live.append(f"node{named}")
            events.append(MachineEvent(at, Change.ADD, live[-1]))
        while len(live) > held:
            gone = live.pop(generator.randrange(len(live)))
            events.append(MachineEvent(at, Change.REMOVE, gone))
    duration = round((samples[-1][0] - start).total_seconds() * 1000)
    return Trace(tuple(events), duration, repairs)


def _order_repair(samples: list[tuple[datetime, int, _Line]]) -> tuple[str, ...]:
    late = [line for (before, _, _), (after, _, line) in itertools.pairwise(samples) if after < before]
    if not late:
        return ()
    where = ", ".join(str(line.number) for line in late[:5]) + (", ..." if len(late) > 5 else "")
    return (f"{late[0].path}: {len(late)} samples out of order (lines {where}): sorted by time",)


def segment(trace: Trace, *, from_hours: float, to_hours: float) -> Trace:
    """The part of a trace between two hours; machines that are there at its start are added at its time 0.

    Raises:
        ScenarioError: the hours are not in order, or lie beyond the trace, where nobody knows what happened.
    """
    start, end = round(from_hours * MILLISECONDS_PER_HOUR), round(to_hours * MILLISECONDS_PER_HOUR)
    if not 0 <= start < end:
        raise ScenarioError(f"segment {from_hours}-{to_hours}: the hours are in order, from 0; for example 1.5-2.5")
    if end > trace.duration_milliseconds:
        last = math.floor(trace.duration_milliseconds / MILLISECONDS_PER_HOUR * 1000) / 1000
        which = "begins" if start >= trace.duration_milliseconds else "ends"
        raise ScenarioError(
            f"segment {from_hours}-{to_hours} {which} after the trace's end, {last:g} h; choose an earlier one"
        )
    live: dict[str, MachineEvent] = {}
    inside: list[MachineEvent] = []
    for event in trace.events:
        if event.at_milliseconds > end:
            break
        if event.at_milliseconds > start:
            inside.append(replace(event, at_milliseconds=event.at_milliseconds - start))
        elif event.change is Change.ADD:
            live[event.node] = replace(event, at_milliseconds=0)
        elif event.change is Change.REMOVE:
            del live[event.node]
    return Trace((*live.values(), *inside), end - start, trace.repairs, trace.begins_at_milliseconds + start)


def capped(events: Iterable[MachineEvent], *, capacity: int) -> list[MachineEvent]:
    """The events of a fleet that never holds more than `capacity` machines.

    What comes while the fleet is full waits (unbilled) and is taken, the longest waiting first, when a slot is free.
    """
    if capacity < 1:
        raise ScenarioError(f"capacity {capacity}: a fleet has at least 1 slot; give a positive number")
    kept: list[MachineEvent] = []
    held: set[str] = set()
    waiting: dict[str, MachineEvent] = {}
    for event in events:
        if event.change is Change.ADD and len(held) == capacity:
            waiting[event.node] = event
        elif event.change is Change.ADD:
            held.add(event.node)
            kept.append(event)
        elif event.node in held:
            kept.append(event)
            if event.change is Change.REMOVE:
                held.discard(event.node)
                if waiting:
                    taken = waiting.pop(next(iter(waiting)))
                    held.add(taken.node)
                    kept.append(replace(taken, at_milliseconds=event.at_milliseconds))
        elif event.change is Change.REMOVE:
            del waiting[event.node]
    return sorted(kept, key=lambda event: (event.at_milliseconds, event.change))
