"""What a worker's main thread does at this moment, in a few bytes of memory that its agent reads.

The worker writes them at every instruction, in a microsecond or two. Its agent needs no thread of the worker to read
them, so they tell of a main thread that is stuck, whatever holds the GIL. The file is made by the agent, and
BAMBOO_PULSE_FILE names it to the worker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from deepspeed_bamboo.protocol import PULSE_FILE

IN_SCRIPT = "its script, outside of the engine's calls"
AT_ITS_OWN_PACE = frozenset({IN_SCRIPT, "save", "load", "latest", "last checkpoint"})
"""What takes as long as script, model and disk want: evaluation, callbacks, files. Never a reason to end a worker."""
BEFORE_STEPS = -1

# When (time.monotonic), the step, whether it waits for others, what it does.
_RECORD = struct.Struct("<dqB79s")
SIZE_BYTES = _RECORD.size
_READS = 5
_KEPT_TEXTS = 20_000


@dataclass(frozen=True)
class PulseReading:
    """``doing`` since ``since_seconds`` (``time.monotonic()``) in ``step``; ``waiting`` for other workers, or busy.

    ``step``: how many steps were completed; BEFORE_STEPS until the engine is there.
    """

    since_seconds: float
    step: int
    waiting: bool
    doing: str


class Pulse:
    """The worker's side, for its main thread; waits of others don't count. Without a file it is for nobody."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        """``memory`` has room for SIZE_BYTES."""
        self._memory, self._thread = memory, threading.get_ident()
        self._texts: dict[Hashable, bytes] = {}
        self._step, self._waiting, self._doing = BEFORE_STEPS, False, IN_SCRIPT.encode()

    @classmethod
    def of_worker(cls, environment: Mapping[str, str]) -> Pulse:
        """The one that this worker's agent reads, if there is one."""
        path = environment.get(PULSE_FILE)
        if path:
            with contextlib.suppress(OSError, ValueError):  # the agent has gone, and this process is about to follow
                descriptor = os.open(path, os.O_RDWR)
                try:
                    return cls(mmap.mmap(descriptor, SIZE_BYTES))
                finally:
                    os.close(descriptor)
        return cls(bytearray(SIZE_BYTES))

    def at(self, doing: Hashable) -> None:
        """The main thread begins with ``doing``, shown as its text: an instruction, an activity, or IN_SCRIPT."""
        text = self._texts.get(doing)
        if text is None:  # the same few thousand instructions come again in every step
            if len(self._texts) >= _KEPT_TEXTS:
                self._texts.clear()
            text = self._texts[doing] = str(doing).encode()[:79]
        self._doing, self._waiting = text, False
        self._write()

    def waits(self, waiting: bool) -> None:
        """It begins, or (False) ends, to wait for other workers in what it does."""
        if threading.get_ident() == self._thread:
            self._waiting = waiting
            self._write()

    def stepped(self, step: int) -> None:
        """So many steps are complete."""
        self._step = step
        self._write()

    def _write(self) -> None:
        _RECORD.pack_into(self._memory, 0, time.monotonic(), self._step, self._waiting, self._doing)


def read_pulse(descriptor: int) -> PulseReading | None:
    """What was written last; None when nothing was yet, or it changes all the time."""
    before = os.pread(descriptor, SIZE_BYTES, 0)
    for _ in range(_READS):
        again = os.pread(descriptor, SIZE_BYTES, 0)
        if again == before:
            since, step, waiting, doing = _RECORD.unpack(again)
            text = doing.rstrip(b"\0").decode(errors="replace")
            return None if since == 0.0 else PulseReading(since, step, bool(waiting), text)
        before = again
    return None
