"""The event log: what happened in a run, as JSON lines that any tool can read.

Each worker appends to a file of its own, one line per event, handed to the operating system at once,
so that a worker killed by a signal loses nothing it has logged. A line::

    {"t": 1717171717.25, "worker": "w2", "epoch": 1, "step": 3, "event": "failover", ...}

``t`` is the wall clock in seconds, ``step`` the step being executed, counted from 0. Floats are written
so that they read back bitwise; a loss that is no number is written as NaN or Infinity, which Python's
reader takes. ``merge_event_files`` makes the one view of a whole run.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.suggest import choose_from

EVENTS = (
    "started",
    "step",
    "loss_of_node",
    "failover",
    "protected",
    "reconfigured",
    "joined",
    "mode",
    "notice",
    "decision",
    "slow_worker",
    "profile",
    "memory",
    "checkpoint",
    "fatal_restore",
    "restored",
    "redone",
    "fault",
    "finished",
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEPT_IN_MEMORY = 1000

logger = logging.getLogger(__name__)


def check_directory(directory: str | os.PathLike[str], *, setting: str = "event_log") -> None:
    """Raise ConfigError where no file can be made in ``directory``, the value of ``setting``, as this machine sees it.

    Leaves nothing behind, not even the directory. A full disk is no reason to refuse: see :class:`EventLog`.
    """
    place = Path(directory)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        # Names of its own, so that it disturbs nobody who uses or makes the directory just now.
        if place == Path(directory):
            tempfile.TemporaryFile(dir=place).close()
        else:
            Path(tempfile.mkdtemp(dir=place, prefix=".bamboo-")).rmdir()
    except OSError as error:
        if error.errno not in _FULL:
            raise ConfigError(
                f"{setting} is {os.fspath(directory)!r}, and {place} can't be written to ({error.strerror}); name a "
                "directory that you may write to, or one that can be made"
            ) from error


class EventLog:
    """One worker's event file. Safe to use from several threads.

    A full disk never ends training: it costs one warning, and the log is off from then on.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        worker: str,
        *,
        run: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``directory``: made if missing; None keeps recent events in memory only.

        ``worker``: names the file; one that exists is continued. ``run``: put into every line from then on, so
        that runs that share a directory can be told apart: all workers of a run give the same, once they know it.
        Raises ConfigError for a directory that can't be used.
        """
        self._worker = worker
        self.run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_KEPT_IN_MEMORY)
        self._count = 0
        self.path = None if directory is None else Path(directory) / event_file_name(worker)
        self._descriptor = None if self.path is None else self._open(self.path)

    def log(self, event: str, *, epoch: int, step: int, **fields: Any) -> None:
        """Append one event. Raises ValueError for an event not in EVENTS, TypeError for a value JSON can't hold."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {choose_from(event, EVENTS)}")
        run = {} if self.run is None else {"run": self.run}
        head = {"t": self._clock(), "worker": self._worker, **run, "epoch": epoch, "step": step, "event": event}
        record = {**head, **fields}
        line = json.dumps(record, default=_plain) + "\n"
        with self._lock:
            self._recent.append((self._count, json.loads(line)))
            self._count += 1
            self._write(line.encode())

    def recent(self, after: int = 0) -> tuple[int, list[dict[str, Any]]]:
        """Events logged by this worker from number ``after`` on (the last 1000 at most), and the next number."""
        with self._lock:
            return self._count, [event for number, event in self._recent if number >= after]

    def close(self) -> None:
        """Close the file; what is logged later goes nowhere. May be called twice."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self, path: Path) -> int | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in _FULL:
                self._warn(error)
                return None
            raise ConfigError(
                f"event log {path} can't be written ({error.strerror}); name a directory that you may write to"
            ) from error
        _drop_torn_tail(descriptor)
        return descriptor

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)
            os.close(self._descriptor)
            self._descriptor = None

    def _warn(self, error: OSError) -> None:
        logger.warning("event log %s is off from here on: %s; training goes on", self.path, error.strerror)


def event_file_name(worker: str) -> str:
    """The name of ``worker``'s event file; characters that a file name can't hold become underscores."""
    return f"events-{re.sub(r'[^A-Za-z0-9._-]', '_', worker)}.jsonl"


def _plain(value: object) -> object:
    """JSON for what a caller may have at hand: paths, and tensors or arrays with one element."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"{value!r} can't be put into an event; use numbers, text, lists or dicts")


def _drop_torn_tail(descriptor: int) -> None:
    """Cut off a last line that a full disk left incomplete, so that the next one starts cleanly."""
    size = os.fstat(descriptor).st_size
    keep = size
    while keep > 0:
        start = max(0, keep - 4096)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        os.ftruncate(descriptor, keep)
