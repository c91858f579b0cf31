"""Simulated time: whole milliseconds since the start, so that equal runs are equal to the last bit."""

from __future__ import annotations

import math

__all__ = [
    "LONGEST_HOURS",
    "LONGEST_MILLISECONDS",
    "MILLISECONDS_PER_HOUR",
    "MILLISECONDS_PER_SECOND",
    "NEVER",
    "hours",
    "to_milliseconds",
]

MILLISECONDS_PER_SECOND = 1_000
MILLISECONDS_PER_HOUR = 3_600_000
# Later than any run: a plain int, because comparing ints is what the event loop does most.
NEVER = 1 << 62
# No run and no recording lasts longer: ten years. Longer ones are slips of the pen, and would take hours to simulate.
LONGEST_HOURS = 87_600
LONGEST_MILLISECONDS = LONGEST_HOURS * MILLISECONDS_PER_HOUR


def to_milliseconds(seconds: float) -> int:
    """Whole milliseconds that are no less than `seconds`: a simulated wait is never rounded away."""
    return math.ceil(round(seconds * MILLISECONDS_PER_SECOND, 6))


def hours(milliseconds: float) -> float:
    """Milliseconds as hours."""
    return milliseconds / MILLISECONDS_PER_HOUR
