"""Calls the coordinator in a thread, so that the agent never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_bamboo.coordination import AnotherRun, CoordinationError, CoordinatorUnavailable

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Errand:
    """A call of the coordinator. ``give_up``: called if the coordinator could not be reached in time."""

    name: str
    run: Callable[[], None]
    within_seconds: float
    give_up: Callable[[], None] | None = None


class Courier:
    """Runs errands one after the other in a thread, each again and again until it succeeds or its time is over."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bamboo-courier", daemon=True)
        self._thread.start()

    def send(self, errand: Errand) -> None:
        """Queue ``errand``; returns at once."""
        self._errands.put(errand)

    def stop(self, *, within_seconds: float) -> bool:
        """Finish the errands there are. False if that was not possible in time; the rest are dropped then."""
        self._errands.put(None)
        self._thread.join(within_seconds)
        self._stopped.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None and not self._stopped.is_set():
            self._carry_out(errand)

    def _carry_out(self, errand: Errand) -> None:
        deadline = time.monotonic() + errand.within_seconds
        while not self._stopped.is_set():
            try:
                errand.run()
                return
            except CoordinatorUnavailable as error:
                if time.monotonic() > deadline:
                    logger.warning("%s: given up, %s", errand.name, error)
                    break
            except AnotherRun as error:  # the agent leaves, as its registration finds the same
                logger.warning("%s: dropped, %s", errand.name, error)
                return
            except CoordinationError:
                logger.exception("%s failed", errand.name)
                break
            self._stopped.wait(_RETRY_SECONDS)
        if errand.give_up is not None:
            errand.give_up()
