"""An agent's events in one queue: from threads, from signal handlers, and from a clock."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable

from deepspeed_bamboo.elastic.decisions import Event

Call = Callable[[], Event]


class Mailbox:
    """``put*`` from anywhere, signal handlers included; ``get`` and ``wait_until`` from one thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, Call]] = queue.SimpleQueue()
        self._later: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def put(self, event: Event) -> None:
        """``event`` has happened."""
        self._queue.put((0.0, lambda: event))

    def put_call(self, call: Call) -> None:
        """``call`` finds out what has happened, in the thread that calls ``get``."""
        self._queue.put((0.0, call))

    def put_later(self, event: Event, *, after_seconds: float) -> None:
        """``event`` will have happened in so many seconds."""
        self._queue.put((time.monotonic() + after_seconds, lambda: event))

    def get(self) -> Event:
        """The next event; waits for it."""
        event = self._next(within_seconds=float("inf"))
        while event is None:
            event = self._next(within_seconds=float("inf"))
        return event

    def wait_until(self, condition: Callable[[Event | None], bool], *, within_seconds: float) -> bool:
        """Take events until ``condition`` holds for one (tried first with None); False when time is over."""
        deadline = time.monotonic() + within_seconds
        event: Event | None = None
        while not condition(event):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            event = self._next(within_seconds=remaining)
        return True

    def _next(self, *, within_seconds: float) -> Event | None:
        deadline = time.monotonic() + within_seconds
        while True:
            now = time.monotonic()
            if self._later and self._later[0][0] <= now:
                return heapq.heappop(self._later)[2]()
            until = min(deadline, self._later[0][0] if self._later else deadline)
            if until <= now:
                return None
            try:
                due, call = self._queue.get(timeout=min(until - now, 3600.0))
            except queue.Empty:
                continue
            if due <= time.monotonic():
                return call()
            heapq.heappush(self._later, (due, next(self._order), call))
