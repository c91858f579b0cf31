"""From the events of a store to the changes of a job: nothing twice, nothing missed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deepspeed_bamboo.coordination.errors import CoordinationError
from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.records import Change
from deepspeed_bamboo.coordination.store import KeyValueStore, StoreEvent, WatchHandle
from deepspeed_bamboo.coordination.values import OddValueError, OddValues

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 0.1


class JobWatch:
    """Calls ``on_change`` from one thread: first for all there is, then for whatever changes.

    Events that the store missed are found by reading again; then the change is told as if it had
    just happened, and a ``resync`` follows. A key changed and changed back between two readings is
    not told. An exception in ``on_change`` is logged, and the watch continues; so is a value without the right form.
    """

    def __init__(self, store: KeyValueStore, keys: JobKeys, on_change: Callable[[Change], None]) -> None:
        self._store = store
        self._keys = keys
        self._on_change = on_change
        self._known: dict[str, int] = {}  # key -> revision of what was told last
        self._read_revision = 0
        self._odd = OddValues()
        self._stopped = threading.Event()
        self._handle: WatchHandle = store.watch(keys.root, self._on_event)

    def stop(self) -> None:
        """No callback begins after this returns, unless called from the callback itself."""
        self._stopped.set()
        self._handle.stop()

    def _on_event(self, event: StoreEvent) -> None:
        if event.kind == "resync":
            self._read_again()
        elif event.revision > self._read_revision:
            self._note(event.key, event.value if event.kind == "put" else None, event.revision)

    def _read_again(self) -> None:
        while not self._stopped.is_set():
            try:
                snapshot = self._store.read(self._keys.root)
            except CoordinationError as error:
                logger.info("reading again after an interruption: %s", error)
                self._stopped.wait(_RETRY_SECONDS)
                continue
            if snapshot.revision < self._read_revision:
                self._known = dict.fromkeys(self._known, 0)  # another history began: the server lost its data
            self._read_revision = snapshot.revision
            present = {entry.key for entry in snapshot.entries}
            for key in [key for key in self._known if key not in present]:
                self._note(key, None, snapshot.revision)
            for entry in snapshot.entries:
                if self._known.get(entry.key) != entry.revision:
                    self._note(entry.key, entry.value, entry.revision)
            self._tell(Change("resync"))
            return

    def _note(self, key: str, value: str | None, revision: int) -> None:
        if value is None:
            self._known.pop(key, None)
        else:
            self._known[key] = revision
        try:
            change = self._keys.change(key, value)
        except OddValueError as error:
            self._odd.report(key, revision, error)
            return
        if change is not None:
            self._tell(change)

    def _tell(self, change: Change) -> None:
        if self._stopped.is_set():
            return
        try:
            self._on_change(change)
        except Exception:
            logger.exception("a watcher of %s failed on %s", self._keys.root, change.kind)
