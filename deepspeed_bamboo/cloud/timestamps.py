"""From a point of time in an answer to a deadline on this process's monotonic clock.

The clock of this machine may be wrong by hours. So "now" is what the answer's own ``Date`` says, and
the machine's clock only counts for an answer without one. Either way the result is kept within what
the cloud promises: a clock can make a drain hasty, never late by more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from deepspeed_bamboo.cloud.metadata_http import Answer


def deadline_of(
    text: object, answer: Answer, *, longest_seconds: float, wall_clock: Callable[[], float] = time.time
) -> float | None:
    """When ``text`` (ISO 8601 or RFC 1123) is, on ``time.monotonic()``; None if it can't be read.

    Counted from when the question was asked, so a slow answer makes it earlier rather than later.
    The past becomes now; more than ``longest_seconds`` ahead becomes that.
    """
    moment = parse(text)
    if moment is None:
        return None
    date = parse(answer.headers.get("date"))
    now = date.timestamp() if date is not None else wall_clock()
    return answer.asked_at_seconds + min(max(0.0, moment.timestamp() - now), longest_seconds)


def parse(text: object) -> datetime | None:
    """An aware point of time from ISO 8601 or RFC 1123 text, UTC unless it says otherwise; None for anything else."""
    if not isinstance(text, str) or not text.strip():
        return None
    cleaned = text.strip()
    for read in (_iso, parsedate_to_datetime):
        try:
            moment = read(cleaned)
            aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
            aware.timestamp()
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
        return aware
    return None


def _iso(text: str) -> datetime:
    return datetime.fromisoformat(text.removesuffix("Z") + "+00:00" if text.endswith("Z") else text)
