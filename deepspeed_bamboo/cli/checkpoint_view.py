"""What ``ds_bamboo status`` says of checkpoints: when the last good one was, and whether that is too long ago."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_bamboo.core.checkpointing import is_overdue


def checkpoint_line(status: Mapping[str, Any], *, now_seconds: float, duration: Callable[[float], str]) -> str | None:
    """A line for people; None where a job takes no checkpoints.

    ``status`` is what the reporter has told, ``now_seconds`` the time of day, ``duration`` says seconds in words.
    """
    found = status.get("checkpoint")
    if not isinstance(found, Mapping):
        return None
    try:
        age = max(0.0, now_seconds - float(found["t"]))
        interval = float(found["interval_seconds"])
        step = None if found["step"] is None else int(found["step"])
    except (KeyError, TypeError, ValueError):
        return None
    if step is None:
        line = f"checkpoint: none yet, after {duration(age)}"
    else:
        line = f"checkpoint: the last good one is that of step {step}, {duration(age)} ago"
    if is_overdue(age, interval_seconds=interval):
        line += f"; that is more than two intervals of {duration(interval)}: see the workers' output for the reason"
    return line
