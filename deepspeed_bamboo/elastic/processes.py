"""Noticing at once that a process is gone, whoever its parent is."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# As early as can be: what a process is handed over to when its parent ends is no launcher of its.
_PARENT = os.getppid()
_INIT = 1


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The running process ``pid``; None when there is none."""
        fields = stat_fields(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    def runs(self) -> bool:
        """Whether that very process still runs (one that waits to be collected does not)."""
        fields = stat_fields(self.pid)
        return fields is not None and int(fields[19]) == self.start_ticks and fields[0] not in ("Z", "X")


def stat_fields(pid: int) -> list[str] | None:
    """``/proc/PID/stat`` from the state on: state, parent, group, session, ...; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def command_line(pid: int) -> list[str]:
    """The arguments that process ``pid`` was started with; empty when they cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    except OSError:
        return []


class DeathWatch:
    """Calls ``on_death(pid)`` from a thread as soon as one of ``pids`` has ended; for each of them once.

    One that does not run any more when the watch begins counts as ended. It is not collected here.
    The watch is over when all have ended.
    """

    def __init__(self, pids: Iterable[int], on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._descriptors: dict[int, int] = {}
        self._gone: list[int] = []
        for pid in pids:
            try:
                self._descriptors[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self._gone.append(pid)
        self._wake_r, self._wake_w = os.pipe()
        self._lock = threading.Lock()
        self._running = True
        self._thread = threading.Thread(target=self._run, name="bamboo-death-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; no call begins after this returns, unless called from ``on_death``."""
        with self._lock:
            if self._running:
                os.write(self._wake_w, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        for pid in self._gone:
            self._on_death(pid)
        poller = select.poll()
        poller.register(self._wake_r, select.POLLIN)
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)
        stopped = False
        while self._descriptors and not stopped:
            ready = {descriptor for descriptor, _ in poller.poll()}
            stopped = self._wake_r in ready
            for descriptor in (ready - {self._wake_r}) if not stopped else ():
                poller.unregister(descriptor)
                os.close(descriptor)
                self._on_death(self._descriptors.pop(descriptor))
        with self._lock:
            self._running = False
            for descriptor in (*self._descriptors, self._wake_r, self._wake_w):
                os.close(descriptor)


def outlived_its_launcher(environment: Mapping[str, str]) -> bool:
    """Whether DeepSpeed's launcher, which started this process, was gone before that could look at it.

    Then init is the parent: a process of another session, which a launcher is not, not even as a container's first.
    """
    return "CROSS_RANK" in environment and _PARENT == _INIT and os.getsid(0) != os.getsid(_INIT)


def launcher_chain() -> tuple[int, ...]:
    """The processes without which this slot has no reason to run: its parent, and ``deepspeed`` above that.

    The ``deepspeed`` command starts one launcher a node and waits. Sent a SIGTERM it ends alone, on one
    machine, and its launcher goes on as an orphan; so both are looked at.
    """
    parent = _PARENT
    fields = stat_fields(parent)
    grandparent = int(fields[1]) if fields is not None else 0
    names = [Path(argument).name for argument in command_line(grandparent)[:4]]
    is_runner = "deepspeed" in names or "ds" in names or "deepspeed.launcher.runner" in names
    return (parent, grandparent) if grandparent > 1 and is_runner else (parent,)
