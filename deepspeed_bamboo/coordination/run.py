"""Which run of its job a process is of: the keys of two runs of one name are the same."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

from deepspeed_bamboo.coordination.errors import AnotherRun, CoordinatorUnavailable
from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.coordination.values import Reader

_CLAIM_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_RUN = "run"


def new_run() -> dict[str, str]:
    """What distinguishes a run that begins now, as a part of the value of ``started``."""
    return {_RUN: secrets.token_hex(8)}


class OwnRun:
    """The run that this process found when it first looked, and whether that is still the one that the store has.

    A machine may be cut off while its job ends and is started again. What it knows is of the old run then, and must
    not be put into the new one. A store that has lost its data knows of no run: then the own one continues.
    """

    def __init__(self, store: KeyValueStore, keys: JobKeys, *, job: str) -> None:
        self._store = store
        self._read = Reader(store)
        self._keys = keys
        self._job = job
        self._lock = threading.Lock()
        self._own: str | None = None

    def forget(self) -> None:
        """The own run is over, or is yet to begin."""
        with self._lock:
            self._own = None

    def check(self) -> None:
        """Note the run at the first call. Raises AnotherRun where that has ended, or another one has begun."""
        found = _identity(self._read.one(self._keys.started, "started"))
        with self._lock:
            if self._own is None:
                self._own = found
            own = self._own
        if own is None or found == own:
            return
        if found is not None:
            raise AnotherRun(f"job {self._job!r} has ended, and has been started anew without this process")
        if self._store.get(self._keys.last_end) is not None:
            raise AnotherRun(f"job {self._job!r} has ended, and this process had not heard of it")

    @property
    def unclaimed(self) -> tuple[str, int]:
        """The guard of a write that must not come into a run that just begins."""
        return self._keys.claim, 0

    def wait_for_claim(self) -> None:
        """Wait for the end of a start of a job of this name. Raises CoordinatorUnavailable when it takes longer."""
        deadline = time.monotonic() + _CLAIM_SECONDS
        while self._store.get(self._keys.claim) is not None:
            if time.monotonic() > deadline:
                raise CoordinatorUnavailable(
                    endpoints=[self._keys.claim],
                    tried_seconds=_CLAIM_SECONDS,
                    reason=f"a job named {self._job!r} is being started",
                )
            time.sleep(_LOOK_SECONDS)


def _identity(started: dict[str, Any] | None) -> str | None:
    return None if started is None else str(started.get(_RUN) or started["time_seconds"])
