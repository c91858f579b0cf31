"""The runs that an event log has, each a start of a job, and which of them are one training.

A job that is started again with the same ``event_log`` writes on in the same files. Every event names its run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.errors import EventLogError

Event = Mapping[str, Any]


def run_name(job: str, *, time_seconds: float) -> str:
    """The name of the run of ``job`` that begins at that time: another one for each start."""
    seconds, part = divmod(round(time_seconds * 1000), 1000)
    return f"{job}@{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{part:03}Z"


@dataclass(frozen=True)
class Run:
    """What the workers of one run wrote, by the names of their files. ``name``: empty where events have none."""

    name: str
    files: Mapping[str, Sequence[Any]]

    @property
    def losses(self) -> dict[int, str]:
        """By step, as text: equal exactly when bitwise equal."""
        return {event["step"]: json.dumps(event.get("loss")) for event in self.events if event["event"] == "step"}

    @property
    def events(self) -> list[Any]:
        """Those of all workers, in order of time."""
        return sorted((event for events in self.files.values() for event in events), key=lambda event: event["t"])


def runs_in(files: Mapping[str, Iterable[Event]]) -> tuple[Run, ...]:
    """The runs in a log, in the order in which they began. ``files``: name -> that worker's events."""
    found: dict[str, dict[str, list[Event]]] = {}
    for name, events in files.items():
        for event in events:
            found.setdefault(event.get("run") or "", {}).setdefault(name, []).append(event)
    runs = (Run(name, its) for name, its in found.items())
    # An event without a name that is no step is of a worker that was not yet one of a job's.
    return tuple(sorted((run for run in runs if run.name or run.losses), key=lambda run: run.events[0]["t"]))


def newest_training(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The newest of ``runs``, after those that it continues: by its first step, which is not the job's first then.

    Raises EventLogError where a run that it would continue has another loss in a step of both.
    """
    if not runs:
        return ()
    parts, losses = [runs[-1]], runs[-1].losses
    for run in reversed(runs[:-1]):
        first, earlier = min(losses, default=0), run.losses
        if first == 0:
            break
        if max(earlier, default=-1) < first - 1:
            continue  # it ended before: another training, or it did not come so far
        other = next((step for step in sorted(earlier) if losses.get(step, earlier[step]) != earlier[step]), None)
        if other is not None:
            raise EventLogError(
                f"run {parts[0].name} begins at step {first}, but run {run.name} before it has another loss in step "
                f"{other} ({earlier[other]}, not {losses[other]}), so it does not continue that one; give each "
                "training an event_log of its own, and move the files of one of them to another directory"
            )
        parts.insert(0, run)
        losses = {**earlier, **losses}
    return tuple(parts)
