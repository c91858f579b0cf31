"""The kernel's view of a process of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from deepspeed_bamboo.protocol import AGENT_PID

_STOPPED = ("T", "t")  # by a signal, or by a debugger
_GONE = ("Z", "X", "x")


def process_state(pid: int) -> str:
    """The state letter of ``/proc/PID/stat`` (see proc(5)); empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether the process is there and stands still because it was stopped (SIGSTOP, a debugger)."""
    return process_state(pid) in _STOPPED


def is_running(pid: int) -> bool:
    """Whether the process is there and may run: busy, waiting, or holding the GIL, but neither stopped nor dead."""
    state = process_state(pid)
    return state != "" and state not in (*_STOPPED, *_GONE)


def is_left_alone(environment: Mapping[str, str]) -> Callable[[], bool]:
    """For a worker: says whether it must show itself that it lives, as its agent is stopped or there is none."""
    agent = environment.get(AGENT_PID)
    return (lambda: True) if not agent else lambda: is_stopped(int(agent))
