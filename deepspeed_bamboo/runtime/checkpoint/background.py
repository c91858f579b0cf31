"""Writes a checkpoint's files beside training, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from deepspeed_bamboo.core.checkpointing import FileFact
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Fill

Facts = Mapping[str, FileFact]


class BackgroundWriter:
    """Does one thing after another. Its thread never keeps a process from ending."""

    def __init__(self, write: Callable[[str, Fill], FileFact]) -> None:
        """``write`` makes a file of that name, and says what is in it; it raises CheckpointError when it can't."""
        self._write = write
        self._thread: threading.Thread | None = None

    def write(
        self, files: Mapping[str, Fill], *, wanted: Callable[[], bool], done: Callable[[str, Facts], None]
    ) -> None:
        """Write ``files``, and stop between two of them once they are not ``wanted``; see :meth:`call` for the rest.

        ``done`` also gets what is in each file.
        """
        facts: dict[str, FileFact] = {}

        def run() -> None:
            for name, fill in files.items():
                if not wanted():
                    raise CheckpointError("it was given up")
                facts[name] = self._write(name, fill)

        self.call(run, done=lambda failure: done(failure, facts))

    def call(self, function: Callable[[], None], *, done: Callable[[str], None]) -> None:
        """Call ``function`` after what there is to do already, then ``done`` with what went wrong ("": nothing).

        Both are called in the writer's thread; this returns at once.
        """
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                function()
            except CheckpointError as error:
                done(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, training continues and somebody must learn of it
                done(f"{type(error).__name__}: {error}")
            else:
                done("")

        self._thread = threading.Thread(target=run, name="bamboo-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, *, timeout_seconds: float | None = None) -> bool:
        """Until all is done, or the time is over; returns whether all is done."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()
