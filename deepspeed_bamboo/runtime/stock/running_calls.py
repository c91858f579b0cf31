"""The stock code that runs now, and whose collectives wait for others; see ``collectives.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_bamboo.runtime.stock.collectives import CallSet
from deepspeed_bamboo.runtime.stock.suspended import SuspendedCall


class RunningCalls:
    """Knows it for one worker."""

    def __init__(self) -> None:
        self._running: CallSet | None = None

    @contextmanager
    def during(self, calls: CallSet) -> Iterator[CallSet]:
        """Inside, stock code runs as part of ``calls``."""
        self._running = calls
        try:
            yield calls
        finally:
            self._running = None

    @property
    def any(self) -> bool:
        """True while stock code reduces or steps."""
        return self._running is not None

    @property
    def current(self) -> SuspendedCall | None:
        """The call whose stock code is running right now."""
        return None if self._running is None else self._running.current

    def pass_gate(self) -> None:
        """In a step: continue only once everybody has agreed that all take it."""
        call = self.current
        if call is not None and call.requests == 0:
            call.exchange(None, "gate", None)
