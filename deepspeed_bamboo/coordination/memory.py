"""The store within one process: for tests and for simulations with threads as workers."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, LeaseExpired
from deepspeed_bamboo.coordination.store import Entry, Snapshot, StoreEvent


class MemoryStore:
    """A KeyValueStore in memory, shared by the threads of one process. Ends with :meth:`close`.

    ``set_available(False)`` makes every call raise CoordinatorUnavailable, as an outage of etcd does;
    leases go on running down meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, tuple[float, float]] = {}  # number -> (seconds, deadline)
        self._numbers = itertools.count(1)
        self._revision = 1
        self._watches: list[_MemoryWatch] = []
        self._available = True
        self._closed = False
        self._reaper = threading.Thread(target=self._expire_leases, name="bamboo-memory-leases", daemon=True)
        self._reaper.start()

    def set_available(self, available: bool) -> None:
        """Begin or end an outage. Watches are told to read again when it ends."""
        with self._changed:
            self._available = available
            if available:
                for watch in self._watches:
                    watch.offer(StoreEvent("resync"))

    def get(self, key: str) -> Entry | None:
        with self._changed:
            self._check()
            return self._entries.get(key)

    def read(self, prefix: str) -> Snapshot:
        with self._changed:
            self._check()
            found = sorted((e for k, e in self._entries.items() if k.startswith(prefix)), key=lambda e: e.key)
            return Snapshot(tuple(found), self._revision)

    def put(self, key: str, value: str, *, lease: int | None = None) -> None:
        with self._changed:
            self._check()
            self._write(key, value, lease)

    def compare_and_swap(
        self, key: str, value: str, *, revision: int, lease: int | None = None, guard: tuple[str, int] | None = None
    ) -> bool:
        with self._changed:
            self._check()
            for name, wanted in [(key, revision), *([guard] if guard else [])]:
                present = self._entries.get(name)
                if (present.revision if present else 0) != wanted:
                    return False
            self._write(key, value, lease)
            return True

    def delete(self, key: str) -> bool:
        with self._changed:
            self._check()
            return self._remove([key]) == 1

    def delete_prefix(self, prefix: str) -> int:
        with self._changed:
            self._check()
            return self._remove([k for k in self._entries if k.startswith(prefix)])

    def watch(self, prefix: str, on_event: Callable[[StoreEvent], None]) -> _MemoryWatch:
        with self._changed:
            watch = _MemoryWatch(prefix, on_event, on_stop=self._forget)
            self._watches.append(watch)
            watch.offer(StoreEvent("resync"))
        return watch

    def grant_lease(self, seconds: float) -> int:
        with self._changed:
            self._check()
            lease = next(self._numbers)
            self._leases[lease] = (seconds, time.monotonic() + seconds)
            self._changed.notify_all()
            return lease

    def keep_alive(self, lease: int) -> bool:
        with self._changed:
            self._check()
            if lease not in self._leases:
                return False
            seconds, _ = self._leases[lease]
            self._leases[lease] = (seconds, time.monotonic() + seconds)
            return True

    def revoke(self, lease: int) -> None:
        with self._changed:
            self._check()
            self._end_lease(lease)

    def compact(self) -> None:
        """Nothing to forget: there are no earlier values."""
        with self._changed:
            self._check()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            watches = list(self._watches)
            self._changed.notify_all()
        for watch in watches:
            watch.stop()
        self._reaper.join()

    def _check(self) -> None:
        if self._closed or not self._available:
            raise CoordinatorUnavailable(endpoints=["memory"], tried_seconds=0.0, reason="it is switched off")

    def _write(self, key: str, value: str, lease: int | None) -> None:
        if lease is not None and lease not in self._leases:
            raise LeaseExpired(lease)
        self._revision += 1
        self._entries[key] = Entry(key, value, self._revision)
        self._lease_of.pop(key, None)
        if lease is not None:
            self._lease_of[key] = lease
        self._publish(StoreEvent("put", key, value, self._revision))

    def _remove(self, keys: list[str]) -> int:
        present = [key for key in keys if key in self._entries]
        if present:
            self._revision += 1
        for key in present:
            del self._entries[key]
            self._lease_of.pop(key, None)
            self._publish(StoreEvent("delete", key, "", self._revision))
        return len(present)

    def _end_lease(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._remove([key for key, owner in self._lease_of.items() if owner == lease])

    def _publish(self, event: StoreEvent) -> None:
        if not self._available:
            return  # missed, as with a broken stream; the resync at the end of the outage makes up for it
        for watch in self._watches:
            if event.key.startswith(watch.prefix):
                watch.offer(event)

    def _forget(self, watch: _MemoryWatch) -> None:
        with self._changed:
            if watch in self._watches:
                self._watches.remove(watch)

    def _expire_leases(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for lease in [number for number, (_, deadline) in self._leases.items() if deadline <= now]:
                    self._end_lease(lease)
                soonest = min((deadline for _, deadline in self._leases.values()), default=None)
                self._changed.wait(None if soonest is None else max(0.0, soonest - now))


class _MemoryWatch:
    """Delivers the events of one prefix to one callback, in order, from its own thread."""

    def __init__(
        self, prefix: str, on_event: Callable[[StoreEvent], None], *, on_stop: Callable[[_MemoryWatch], None]
    ) -> None:
        self.prefix = prefix
        self._on_event = on_event
        self._on_stop = on_stop
        self._events: queue.SimpleQueue[StoreEvent | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="bamboo-memory-watch", daemon=True)
        self._thread.start()

    def offer(self, event: StoreEvent) -> None:
        self._events.put(event)

    def stop(self) -> None:
        self._stopped.set()
        self._events.put(None)
        self._on_stop(self)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _deliver(self) -> None:
        while (event := self._events.get()) is not None and not self._stopped.is_set():
            self._on_event(event)
