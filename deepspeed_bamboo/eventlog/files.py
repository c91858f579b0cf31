"""Reads event files back, and merges a run's into one ``events.jsonl``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import EventLogError

MERGED_NAME = "events.jsonl"

# Events that belong to the whole job: every worker that logs one must say the same in these fields.
_JOB_WIDE: Mapping[str, tuple[str, ...]] = {
    "step": ("loss", "samples"),
    "finished": ("loss", "digest"),
}

Event = dict[str, Any]

# What readers of events rely on, and of which types it is.
_NUMBER = (int, float)
_FIELDS: Mapping[str, tuple[type, ...]] = {"t": _NUMBER, "step": (int,), "event": (str,)}
_FIELDS_OF: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "step": {"loss": _NUMBER},
    "finished": {"loss": (*_NUMBER, type(None)), "digest": (str, type(None))},
    "failover": {
        "epoch": (int,),
        "lost": (list,),
        "pause_seconds": (dict,),
        "recomputed": (dict,),
        "first_recomputed_t": (*_NUMBER, type(None)),
    },
}
_NEEDED_OF: Mapping[str, tuple[str, ...]] = {"step": ("loss",), "failover": ("epoch",)}


def read_events(path: str | os.PathLike[str], *, as_written: bool = False) -> list[Event]:
    """The events of one file, in its order. A last line without an end (a full disk) is left out.

    Raises EventLogError that names file and line for any other line that is no JSON object, or, with ``as_written``,
    that no worker can have written.
    """
    events: list[Event] = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EventLogError(f"{os.fspath(path)}, line {number}: no JSON ({error}); the file was changed") from error
        wrong = _wrong_in(event) if as_written or not isinstance(event, dict) else ""
        if wrong:
            raise EventLogError(f"{os.fspath(path)}, line {number}: {line[:200]!r} {wrong}; the file was changed")
        events.append(event)
    return events


def _wrong_in(event: Any) -> str:
    """Why ``event`` is none that a worker has written, in a few words; empty for one that is."""
    if not isinstance(event, dict):
        return "is no JSON object"
    for name, kinds in _FIELDS.items():
        if type(event.get(name)) not in kinds:
            return f"has no {name} that is one"
    for name, kinds in _FIELDS_OF.get(event["event"], {}).items():
        if name in event and type(event[name]) not in kinds:
            return f"has a {name} that is none"
    for name in _NEEDED_OF.get(event["event"], ()):
        if name not in event:
            return f"has no {name}"
    pauses = event.get("pause_seconds")
    if isinstance(pauses, dict) and any(type(seconds) not in _NUMBER for seconds in pauses.values()):
        return "has a pause that is no number"
    return ""


def read_worker_files(directory: str | os.PathLike[str]) -> dict[str, list[Event]]:
    """The events of every worker's file in ``directory``, by the file's name. Raises as read_events does."""
    return {path.name: read_events(path, as_written=True) for path in sorted(Path(directory).glob("events-*.jsonl"))}


def merge_events(files: Mapping[str, Iterable[Event]]) -> list[Event]:
    """All events of one run in order of time. ``files``: name -> that worker's events.

    Of ``step`` and ``finished``, which every worker logs, the earliest per step is kept.
    Raises EventLogError where workers disagree bitwise about one.
    """
    everything = [(event, name) for name, events in sorted(files.items()) for event in events]
    everything.sort(key=lambda pair: pair[0]["t"])
    merged: list[Event] = []
    first: dict[tuple[str, int], tuple[Event, str]] = {}
    for event, name in everything:
        kind = event["event"]
        if kind not in _JOB_WIDE:
            merged.append(event)
            continue
        key = (kind, event["step"])
        if key not in first:
            first[key] = (event, name)
            merged.append(event)
        else:
            _require_agreement(first[key], (event, name))
    return merged


def merge_event_files(directory: str | os.PathLike[str], *, run: str | None = None) -> Path:
    """Merge all workers' files in ``directory`` into its ``events.jsonl``, which appears whole or not at all.

    ``run``: only events of that run (see EventLog). Returns the path of the merged file.
    Raises EventLogError when there is nothing to merge, and as read_events and merge_events do.
    """
    folder = Path(directory)
    files = read_worker_files(folder)
    if run is not None:
        files = {name: [event for event in events if event.get("run") == run] for name, events in files.items()}
    if not any(files.values()):
        raise EventLogError(f"no events in {folder}; was it the run's event log directory?")
    text = "".join(json.dumps(event) + "\n" for event in merge_events(files))
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".events-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # noqa: PTH101
        target = folder / MERGED_NAME
        os.replace(temporary, target)  # noqa: PTH105
    except BaseException:
        os.unlink(temporary)  # noqa: PTH108
        raise
    return target


def _require_agreement(first: tuple[Event, str], other: tuple[Event, str]) -> None:
    (event, name), (event_too, name_too) = first, other
    for field in _JOB_WIDE[event["event"]]:
        # As text: equal exactly when bitwise equal, and NaN equals itself.
        one, another = json.dumps(event.get(field)), json.dumps(event_too.get(field))
        if one != another:
            raise EventLogError(
                f"workers disagree about the {field} of {event['event']} {event['step']}: {one} in {name}, "
                f"{another} in {name_too}; either two runs share the directory or the run went wrong"
            )
