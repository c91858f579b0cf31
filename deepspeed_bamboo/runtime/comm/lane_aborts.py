"""Communicators that NCCL is giving up: no tensor of the job goes over new lanes until it is done with them.

To give one up, NCCL frees memory, which waits until the device is idle and holds up whatever this process launches
meanwhile. A send that the peer has yet to take keeps the device busy. So two workers that both send before they
receive, each while it still gives something up, would wait for each other for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 30.0


class LaneAborts:
    """Those of one worker.

    Args:
        notify: called, on some thread, each time that one has ended.
        patience_seconds: after so long a wait continues without those that have not ended.
    """

    def __init__(self, notify: Callable[[], None], *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._notify = notify
        self._patience_seconds = patience_seconds
        self._running: list[threading.Thread] = []

    def start(self, abort: Callable[[], None]) -> None:
        """Call ``abort`` on a thread of its own."""
        thread = threading.Thread(target=self._run, args=(abort,), name="bamboo-abort-lane", daemon=True)
        self._running = [*self._unfinished(), thread]
        thread.start()

    @property
    def pending(self) -> bool:
        """Whether NCCL is still at one of them."""
        return bool(self._unfinished())

    def wait(self) -> None:
        """Until all that were started have ended; blocks, so not for the main thread."""
        start = time.monotonic()
        for thread in self._unfinished():
            thread.join(max(0.0, start + self._patience_seconds - time.monotonic()))
        left = len(self._unfinished())
        if left:
            logger.warning(
                "NCCL has been giving up %d communicators for %.0f s, and is not done; the job continues without "
                "waiting for it. If it stands still now, send the output of py-spy with the log",
                left,
                self._patience_seconds,
            )

    def _unfinished(self) -> list[threading.Thread]:
        return [thread for thread in self._running if thread.is_alive()]

    def _run(self, abort: Callable[[], None]) -> None:
        try:
            abort()
        finally:
            self._notify()
