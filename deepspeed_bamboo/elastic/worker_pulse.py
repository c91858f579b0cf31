"""The agent's view of its worker: what it does now, and where its main thread is when it stands still."""

from __future__ import annotations

import os
import time
from pathlib import Path

from deepspeed_bamboo.protocol import PULSE_FILE, STACK_FILE, STACK_SIGNAL
from deepspeed_bamboo.pulse import SIZE_BYTES, PulseReading, read_pulse

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.01
_LIMIT_BYTES = 20_000
_SHOWN_LINES = 40


class WorkerPulse:
    """Two files in memory for one worker, which finds their paths in :attr:`environment`; to be closed after it."""

    def __init__(self) -> None:
        self._pulse = os.memfd_create("bamboo-pulse", os.MFD_CLOEXEC)
        os.ftruncate(self._pulse, SIZE_BYTES)
        self._stack = os.memfd_create("bamboo-stack", os.MFD_CLOEXEC)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that name them to the worker."""
        here = f"/proc/{os.getpid()}/fd"
        return {PULSE_FILE: f"{here}/{self._pulse}", STACK_FILE: f"{here}/{self._stack}"}

    def read(self) -> PulseReading | None:
        """What the worker does now; None when it has not written it yet."""
        return read_pulse(self._pulse)

    def stack(self, pid: int) -> str:
        """The Python stack of the main thread of worker ``pid``, the innermost call first.

        Empty where it is not available: the worker is not that far yet, or its kernel does not answer it. Takes a
        second at most.
        """
        if not catches(pid, STACK_SIGNAL):
            return ""
        before = os.fstat(self._stack).st_size
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        deadline = time.monotonic() + _ANSWER_SECONDS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            known, text = text, os.pread(self._stack, _LIMIT_BYTES, before).decode(errors="replace")
            if text and text == known:
                break
        return "\n".join(line for line in text.splitlines()[:_SHOWN_LINES] if line.startswith("  "))

    def close(self) -> None:
        os.close(self._pulse)
        os.close(self._stack)


def catches(pid: int, number: int) -> bool:
    """Whether process ``pid`` has a handler for signal ``number``, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return bool(int(masks.get("SigCgt", "0"), 16) >> (int(number) - 1) & 1)
