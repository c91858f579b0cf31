"""How a worker's traceback reaches its agent: a file in memory that the agent holds open.

The worker finds its path in BAMBOO_ERROR_FILE. It needs no folder, and leaves nothing
behind when either of the two is killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed_bamboo.protocol import ERROR_FILE

_LIMIT_BYTES = 200_000


class ErrorReport:
    """The agent's side: one report for one worker. Close it when that worker is gone."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("bamboo-error", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """Where a process of the same user can open the report while this agent runs."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        """What the worker has written; empty when it wrote nothing. The end of it, if that is very long."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, _LIMIT_BYTES, max(0, size - _LIMIT_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self._descriptor)


def write_report(text: str) -> bool:
    """The worker's side: give ``text`` to the agent, unless it has a report already.

    False when there is no agent; then the caller prints it.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    try:
        if Path(path).stat().st_size == 0:
            Path(path).write_text(text, encoding="utf-8")
    except OSError:
        return False
    return True


def last_line(traceback: str) -> str:
    """The last line of a traceback, which names the exception."""
    lines = [line for line in traceback.splitlines() if line and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else ""
