"""Reads a job's keys, and accepts only values that have the right form.

Somebody else may write to the same etcd, by mistake or by another version. A value that can't be read is
reported once, in the log, and ignored.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_bamboo.coordination.records import AgentRecord, Drain, EndedJob, EpochRecord, JobFailure, Member
from deepspeed_bamboo.coordination.shared_registration import LEASE, LEASE_SECONDS
from deepspeed_bamboo.coordination.store import Entry, KeyValueStore
from deepspeed_bamboo.long_work import WorkFacts

logger = logging.getLogger(__name__)

# A member's value carries its generation and its lease as well, which are nobody's business outside of this part.
GENERATION = "generation"
_NOT_OF_MEMBERS = (GENERATION, LEASE, LEASE_SECONDS)

_REMEMBERED = 1000
_SHOWN = 120
_COUNTS = 2**31


class OddValueError(ValueError):
    """A value does not have the form of its key's kind."""


def encode(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def decode_as(kind: str, text: str) -> Any:
    """The value of a key of ``kind``. Raises OddValueError, which says what it is instead."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a character is in no text that can be shown
        return _READERS[kind](value)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise OddValueError(f"{shown!r} is no {kind} ({type(error).__name__}: {str(error)[:_SHOWN]})") from error


def member_of(value: Mapping[str, Any]) -> Member:
    """The member that a value of its key describes."""
    return Member.from_json({name: field for name, field in value.items() if name not in _NOT_OF_MEMBERS})


def member_text(member: Member, *, generation: int) -> str:
    """Inverse of :func:`member_of`, as a worker of ``generation`` writes it."""
    return encode({**member.to_json(), GENERATION: generation})


class OddValues:
    """Logs once for each that it is ignored."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED)

    def report(self, key: str, revision: int, error: OddValueError) -> None:
        if (key, revision) not in self._told:
            self._told.append((key, revision))
            logger.warning("the etcd key %s is ignored: %s", key, error)


class Reader:
    """Typed reads of a store. Raises CoordinatorUnavailable, as the store does."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._odd = OddValues()

    def one(self, key: str, kind: str) -> Any:
        """The value of ``key``; None when there is none that has the form of ``kind``."""
        return self.with_revision(key, kind)[0]

    def with_revision(self, key: str, kind: str) -> tuple[Any, int]:
        """The same, and the revision at which it may be replaced."""
        entry = self._store.get(key)
        return (None, 0) if entry is None else (self._value(entry, kind), entry.revision)

    def children(self, prefix: str, kind: str) -> list[tuple[str, Any]]:
        """The values below ``prefix``, with what their keys have behind it, in the order of the keys."""
        found = [(entry, self._value(entry, kind)) for entry in self._store.read(prefix).entries]
        return [(entry.key.removeprefix(prefix), value) for entry, value in found if value is not None]

    def _value(self, entry: Entry, kind: str) -> Any:
        try:
            return decode_as(kind, entry.value)
        except OddValueError as error:
            self._odd.report(entry.key, entry.revision, error)
            return None


def _record(record: type[Any]) -> Callable[[Any], Any]:
    """A reader of the dataclass ``record``, all of whose fields have the types that it says."""
    hints = typing.get_type_hints(record)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(record)}

    def read(value: Any) -> Any:
        found = _dict(value)
        for name, content in found.items():
            if name in fields and not _is_a(content, fields[name]):
                raise ValueError(f"{name} is {content!r}")
        return record.from_json(found)

    return read


def _is_a(content: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_is_a(content, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return isinstance(content, str)  # a later version may have further ones
    if typing.get_origin(hint) is tuple:
        return isinstance(content, list) and all(_is_a(item, typing.get_args(hint)[0]) for item in content)
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return isinstance(content, numbers) and not isinstance(content, bool)
    return hint not in (str, bool, type(None)) or isinstance(content, hint)


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _member_value(value: Any) -> dict[str, Any]:
    """What a worker has written, its generation included; it has the form of a member."""
    found = dict(_dict(value))
    _count(found.get(GENERATION, 0))
    _read_member({name: field for name, field in found.items() if name not in _NOT_OF_MEMBERS})
    return found


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _COUNTS:
        raise TypeError(f"not a whole number from 0 to {_COUNTS - 1}")
    return value


def _texts(*names: str) -> Callable[[Any], dict[str, Any]]:
    """A reader of an object in which at least these are texts."""

    def read(value: Any) -> dict[str, Any]:
        for name in names:
            if not isinstance(_dict(value)[name], str):
                raise TypeError(f"{name} is no text")
        return _dict(value)

    return read


def _hang(value: Any) -> dict[str, Any]:
    found = _texts("node", "doing", "stack")(value)
    _count(found["rank"]), _count(found["step"])
    if not _is_a(found["seconds"], float) or not isinstance(found["waiting"], bool):
        raise TypeError("seconds or waiting")
    return found


def _work(value: Any) -> dict[str, Any]:
    return WorkFacts.from_json(_texts("what", "unit")(value)).to_json()


def _ended(value: Any) -> dict[str, Any]:
    _count(_dict(value).get(GENERATION, 0))
    return _dict(value)


def _started(value: Any) -> dict[str, Any]:
    _count(_dict(value).get("slots", 0))
    float(value["time_seconds"])
    return _dict(value)


def _events(value: Any) -> dict[str, Any]:
    """What has happened lately, each with time, step and name."""
    for event in _dict(value)["events"]:
        _count(event["step"])
        if not _is_a(event["t"], float) or not isinstance(event["event"], str):
            raise TypeError("t or event")
    return {"events": list(value["events"])}


def _status(value: Any) -> dict[str, Any]:
    """Of a running job: shown as it is, once its few fixed parts are what they should be."""
    found = _dict(value)
    _count(found["step"])
    if not _is_a(found["t"], float) or not _is_a(found.get("seconds", 0.0), float):
        raise TypeError("t or seconds")
    return found


def _past(value: Any) -> dict[str, Any]:
    """Losses as text, and those of evaluations by step."""
    found = _dict(value)
    if not isinstance(found["losses"], str) or any(not its.isdecimal() for its in _dict(found["evaluations"])):
        raise TypeError("losses or evaluations")
    return found


def _piece(value: Any) -> dict[str, Any]:
    _count(_texts("text")(value)["of"])
    return _dict(value)


_read_member = _record(Member)
_READERS: dict[str, Callable[[Any], Any]] = {
    "epoch": _record(EpochRecord),
    "member": _member_value,
    "agent": _record(AgentRecord),
    "failure": _record(JobFailure),
    "drain": _record(Drain),
    "ended_job": _record(EndedJob),
    "stop": lambda value: _texts("reason")(value)["reason"],
    "generation": _count,
    "next_rank": _count,
    "ended": _ended,
    "suspicion": _texts("reporter", "reason"),
    "hang": _hang,
    "started": _started,
    "status": _status,
    "past": _past,
    "events": _events,
    "progress": _dict,
    "piece": _piece,
    "work": _work,
    "report": _dict,
    "whereabouts": _dict,
    "finished": _dict,
    "facts": _dict,
}
