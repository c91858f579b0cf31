"""Measures how long a worker is in its script, outside of the engine."""

from __future__ import annotations

import time


class ScriptClock:
    """Of one worker's main thread. Stands still until the engine has been left once."""

    def __init__(self) -> None:
        self._left: float | None = None
        self._seconds = 0.0

    def leave_engine(self) -> None:
        """A call of the engine ends."""
        self._left = time.perf_counter()

    def enter_engine(self) -> None:
        """A call of the engine begins."""
        if self._left is not None:
            self._seconds += time.perf_counter() - self._left
        self._left = None

    def take_seconds(self) -> float:
        """Seconds in the script since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
