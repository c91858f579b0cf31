"""A kill that comes from outside at a moment nobody chose, as a cloud's does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.files import read_events

_LOOK_EVERY_SECONDS = 0.002


@dataclass(frozen=True)
class OutsideKill:
    """``kill -9`` of the worker of ``rank``, ``delay_seconds`` after step ``after_step`` was logged by anyone."""

    rank: int
    after_step: int
    delay_seconds: float

    def __str__(self) -> str:
        return f"outside-rank{self.rank}-step{self.after_step}+{1000 * self.delay_seconds:.0f}ms"


class OutsideKiller:
    """Waits for the moment in a thread of its own, and strikes once. Use as a context manager around the job."""

    def __init__(self, kill: OutsideKill, *, events: Path, strike: Callable[[int], object]) -> None:
        """``events``: the job's event log directory. ``strike``: kills the worker of a rank."""
        self._kill = kill
        self._events = events
        self._strike = strike
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outside-kill")
        self.struck = False

    def __enter__(self) -> OutsideKiller:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._reached():
                time.sleep(self._kill.delay_seconds)
                if not self._over.is_set():
                    self._strike(self._kill.rank)
                    self.struck = True
                return
            self._over.wait(_LOOK_EVERY_SECONDS)

    def _reached(self) -> bool:
        for path in self._events.glob("events-*.jsonl"):
            try:
                events = read_events(path)
            except (OSError, EventLogError):
                continue
            if any(event["event"] == "step" and event["step"] >= self._kill.after_step for event in events):
                return True
        return False
