"""When etcd does not answer: messages, once each, and a first call that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from deepspeed_bamboo.coordination import CoordinatorUnavailable, LeaseExpired

_Result = TypeVar("_Result")
_RETRY_SECONDS = 0.1
_TOLD_AFTER_SECONDS = 5.0
_LEASES = 0.75  # a lease is renewed three times in its length, so this long without an answer is no accident


class OutageNews:
    """Told from time to time for how long etcd has not answered; returns the message for the user."""

    def __init__(self, endpoints: Sequence[str], *, lease_seconds: float, gives_up_after_seconds: float | None) -> None:
        """``gives_up_after_seconds``: when the job ends without it; None for the user's etcd: the job waits."""
        self._where = f"etcd at {', '.join(endpoints)}"
        self._limit_seconds = max(_TOLD_AFTER_SECONDS, lease_seconds * _LEASES)
        self._gives_up_after_seconds = gives_up_after_seconds
        self._longest_seconds = 0.0  # of the outage that was told of; 0: none

    def hear(self, cut_off_seconds: float) -> str | None:
        """What to say about an etcd that answered last so many seconds ago; None for nothing (new)."""
        if cut_off_seconds < self._limit_seconds:
            lasted, self._longest_seconds = self._longest_seconds, 0.0
            return f"{self._where} answers again, after {lasted:.0f} s" if lasted else None
        first, self._longest_seconds = not self._longest_seconds, cut_off_seconds
        if not first:
            return None
        end = self._gives_up_after_seconds
        then = "" if end is None else f"; if it is not back within {end:.0f} s, the job ends"
        return (
            f"{self._where} has not answered for {cut_off_seconds:.0f} s; training continues, but a loss would "
            f"wait for it{then}"
        )


def once_it_answers(call: Callable[[], _Result], *, within_seconds: float) -> _Result:
    """What ``call`` returns, repeated while the coordinator does not answer in time or a lease runs out meanwhile.

    For the start of a job, when all processes of a machine import torch at once and etcd, too, waits for a core.
    Raises CoordinatorUnavailable or LeaseExpired when ``call`` still fails after ``within_seconds``.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return call()
        except (CoordinatorUnavailable, LeaseExpired):
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)
