"""The one signal that ends every wait of the main thread, and the exceptions in which it surfaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed_bamboo.coordination import EpochRecord, JobFailure
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.errors import ExpelledError, JobFailedError


class EpochChangedError(Exception):
    """A new epoch exists: what was being waited for will not come. Handled by recovery, never by users."""


class JobCompleteError(Exception):
    """The job is complete, and this worker is at its end: nobody will answer any more. Handled there."""


class PeerLostError(Exception):
    """A transfer with ``peer`` failed before any new epoch was seen. Handled by recovery, never by users."""

    def __init__(self, peer: str, cause: str, *, farewell: bool = False) -> None:
        """``farewell``: the peer is alive and has dropped the channel itself, since it knows of a new epoch."""
        super().__init__(f"transfer with worker {peer} failed: {cause}")
        self.peer = peer
        self.cause = cause
        self.farewell = farewell


class Interruption:
    """Shared by the monitor thread, which sets it, and all waits of the main thread, which it ends.

    :meth:`enter` says which epoch the main thread works in; a newer record interrupts its waits.
    """

    def __init__(self, *, on_wait: Callable[[bool], None] = lambda waiting: None) -> None:
        """``on_wait`` is called, on the thread that waits, when a wait begins (True) and when it ends."""
        self._on_wait = on_wait
        self.condition = threading.Condition()
        self._record: EpochRecord | None = None
        self._seen_seconds = 0.0
        self._failure: JobFailure | None = None
        self._expelled = ""  # why
        self._complete = self._ends_when_complete = False
        self._active: EpochRecord | None = None
        self._changes = 0
        self._expected: tuple[tuple[str, ...], Placement] | None = None
        self._release: Callable[[], None] = lambda: None

    def on_interruption(self, release: Callable[[], None]) -> None:
        """``release`` is called, on the announcing thread, when the main thread's waits end. It must not block."""
        self._release = release

    @property
    def epoch(self) -> int:
        """Number of the epoch that the main thread works in; -1 before the first."""
        return -1 if self._active is None else self._active.number

    @property
    def active(self) -> EpochRecord | None:
        """The epoch that the main thread works in."""
        return self._active

    def enter(self, record: EpochRecord) -> None:
        """The main thread works in ``record`` from now on; only newer ones interrupt it."""
        with self.condition:
            self._active = record
            if self._record is None or record.number > self._record.number:
                self._record = record

    def expect(self, members: tuple[str, ...] | None, placement: Placement | None = None) -> None:
        """An epoch with just these is what the main thread works towards, and no interruption; None: no longer."""
        with self.condition:
            self._expected = None if members is None or placement is None else (members, placement)

    def foresees(self, record: EpochRecord) -> bool:
        """True when ``record`` is the one that the main thread works towards."""
        with self.condition:
            return not record.lost and self._expected == (record.members, record.placement)

    def wait_for_expected(self, *, after: int) -> EpochRecord:
        """Wait for the epoch named by :meth:`expect`, with a number above ``after``. Raises as :meth:`wait_until`."""
        found: list[EpochRecord] = []

        def there() -> bool:
            if self._record is not None and self._record.number > after and self.foresees(self._record):
                found.append(self._record)
            return bool(found)

        self.wait_until(there)
        return found[0]

    def announce_epoch(self, record: EpochRecord) -> None:
        """Called by the monitor for every epoch record it sees; older ones are ignored."""
        with self.condition:
            if self._record is None or record.number > self._record.number:
                self._record = record
                self._seen_seconds = time.time()
                self.condition.notify_all()
        self._release_if_set()

    def announce_failure(self, failure: JobFailure) -> None:
        """The job has failed somewhere; every wait ends with :class:`JobFailedError`."""
        with self.condition:
            if self._failure is None:
                self._failure = failure
            self.condition.notify_all()
        self._release_if_set()

    def announce_expulsion(self, why: str = "its lease ran out or a peer reported it dead") -> None:
        """This worker is no longer part of the job; mostly since its own lease is gone."""
        with self.condition:
            self._expelled = self._expelled or why
            self.condition.notify_all()
        self._release_if_set()

    def announce_completion(self) -> None:
        """The job is complete: all members have come to its end."""
        with self.condition:
            self._complete = True
            self.condition.notify_all()
        self._release_if_set()

    @contextmanager
    def ending_when_complete(self) -> Iterator[None]:
        """Inside, every wait ends with :class:`JobCompleteError` once the job is complete: others may have left."""
        with self.condition:
            self._ends_when_complete = True
        try:
            self._release_if_set()
            yield
        finally:
            with self.condition:
                self._ends_when_complete = False

    @property
    def record(self) -> EpochRecord | None:
        """The newest epoch seen."""
        with self.condition:
            return self._record

    @property
    def seen_seconds(self) -> float:
        """Wall clock at which the newest epoch was first seen here."""
        with self.condition:
            return self._seen_seconds

    def check(self) -> None:
        """Raise if anything was announced that ends the current wait."""
        with self.condition:
            self._raise_if_set()

    def wait_until(self, predicate: Callable[[], bool], *, timeout_seconds: float | None = None) -> bool:
        """Wait for ``predicate``, evaluated under the condition's lock; False on time-out.

        Raises EpochChangedError, JobFailedError, ExpelledError or JobCompleteError when one of those comes first.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self.condition:
            if predicate():
                return True
            self._on_wait(True)
            try:
                return self._wait(predicate, deadline=deadline)
            finally:
                self._on_wait(False)

    def _wait(self, predicate: Callable[[], bool], *, deadline: float | None) -> bool:
        """Under the condition's lock."""
        while True:
            self._raise_if_set()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            # A bounded wait also keeps the main thread reachable for signals.
            self.condition.wait(min(0.5, left) if left is not None else 0.5)
            if predicate():
                return True

    @property
    def changes(self) -> int:
        """How often :meth:`notify` was called; read it before looking, then :meth:`wait_for_change`."""
        with self.condition:
            return self._changes

    def wait_for_change(self, *, since: int, timeout_seconds: float) -> bool:
        """Wait until :attr:`changes` has left ``since``; False on time-out. Raises as :meth:`wait_until` does."""
        return self.wait_until(lambda: self._changes != since, timeout_seconds=timeout_seconds)

    def notify(self) -> None:
        """Something that a predicate looks at has changed."""
        with self.condition:
            self._changes += 1
            self.condition.notify_all()

    def _release_if_set(self) -> None:
        try:
            self.check()
        except (EpochChangedError, JobFailedError, ExpelledError, JobCompleteError):
            self._release()

    def _raise_if_set(self) -> None:
        if self._complete and self._ends_when_complete:
            raise JobCompleteError("the job is complete")
        if self._failure is not None:
            raise JobFailedError(self._failure.message, origin=self._failure.worker)
        if self._expelled:
            raise ExpelledError(f"this worker was expelled from the job: {self._expelled}")
        if self._record is not None and self._record.number > self.epoch and not self._is_foreseen():
            raise EpochChangedError(f"epoch {self._record.number} replaces epoch {self.epoch}")

    def _is_foreseen(self) -> bool:
        """True for the epoch expected, and when a new one only has more: nobody was lost, owners are as they were."""
        if self._active is None or self._record is None or self._record.lost:
            return False
        if self._expected == (self._record.members, self._record.placement):
            return True
        return (
            set(self._active.members) <= set(self._record.members)
            and self._active.placement.owners == self._record.placement.owners
        )
