"""A timeline in the Trace Event Format, which chrome://tracing and Perfetto draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.timeline import Timed


def chrome_trace(
    timeline: Iterable[Timed], *, placement: Placement, microseconds_per_slot: int = 1000
) -> dict[str, Any]:
    """A value that ``json`` can write: one track per worker, passes as bars, everything else as instants.

    The format is that of the "Trace Event Format" document of the Chromium project.
    """
    events: list[dict[str, Any]] = []
    # In the order of ranks; a worker that holds nothing but shadows comes after those.
    holders = (*placement.workers, *(worker for _, worker in placement.all_shadows))
    track = {worker: i for i, worker in enumerate(dict.fromkeys(holders))}
    for worker, tid in track.items():
        hosted = " ".join(str(c) for c in placement.hosted_by(worker)) or "shadows only"
        name = {"name": f"{worker} ({hosted})"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": name})
    for timed in timeline:
        event = {
            "name": str(timed.instruction),
            "cat": timed.instruction.op.value,
            "pid": 0,
            "tid": track[timed.worker],
            "ts": timed.start * microseconds_per_slot,
        }
        if timed.end > timed.start:
            events.append({**event, "ph": "X", "dur": (timed.end - timed.start) * microseconds_per_slot})
        else:
            events.append({**event, "ph": "i", "s": "t"})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
