"""Collecting what callbacks are told, and waiting for it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from deepspeed_bamboo.coordination.records import EpochRecord, Member
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement

T = TypeVar("T")
_names = itertools.count()


def unique_name() -> str:
    """A job name that no other test uses."""
    return f"test-{os.getpid()}-{next(_names)}"


class Collector(Generic[T]):
    """A callback that keeps what it is told, with the time, and lets the test wait for it."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self.times: list[float] = []
        self._changed = threading.Condition()

    def __call__(self, item: T) -> None:
        with self._changed:
            self.items.append(item)
            self.times.append(time.monotonic())
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[T], bool], *, within_seconds: float = 10.0) -> tuple[T, float]:
        """The first item that is ``wanted`` and when it came. Fails the test when none comes in time."""
        deadline = time.monotonic() + within_seconds
        with self._changed:
            while True:
                for item, when in zip(self.items, self.times, strict=True):
                    if wanted(item):
                        return item, when
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"waited {within_seconds} s in vain; was told {self.items}"
                self._changed.wait(remaining)


def stretched(seconds: float) -> float:
    """``seconds`` on an idle machine, in the time that the same work takes on this one at this moment.

    Limits on durations are meant for a machine of one's own; a shared one is measured first.
    """
    start, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < 0.02:
        sum(range(1000))
    return seconds * max(1.0, (time.monotonic() - start) / 0.02)


def pause_after(start: float) -> None:
    """Between two looks at what has been waited for since ``start``: 5 ms, and 50 ms once a second has passed."""
    time.sleep(min(max(0.005, (time.monotonic() - start) / 20), 0.05))


def wait_until(condition: Callable[[], bool], *, within_seconds: float = 10.0, what: str = "a condition") -> float:
    """Seconds until ``condition`` was true. Fails the test when it does not come true in time."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_seconds, f"waited {within_seconds} s in vain for {what}"
        pause_after(start)
    return time.monotonic() - start


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for init to collect it does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def member(worker: str, *, rank: int = 0) -> Member:
    return Member(
        worker=worker, node="n0", zone="z0", address="127.0.0.1", store_port=4000 + rank, pid=os.getpid(), rank=rank
    )


def first_epoch(workers: list[str], *, stages: int | None = None, protected: bool = True) -> EpochRecord:
    grid = Grid(1, stages or len(workers))
    return EpochRecord(
        number=0,
        members=tuple(workers),
        placement=Placement.initial(grid, workers, protected=protected),
        reason="start",
        lost=(),
        proposer=workers[0],
        time_seconds=time.time(),
    )


def freeze(pid: int) -> None:
    """SIGSTOP, and return when it has stopped: on a busy machine other threads run on until one has taken it."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    wait_until(
        lambda: all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads),
        what=f"all threads of process {pid} to stop",
    )
