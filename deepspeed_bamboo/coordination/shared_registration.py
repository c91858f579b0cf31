"""A worker's key, kept alive by its agent, so that a busy worker does not lose it.

The worker enters the key, under a lease whose number stands in the value. Its agent finds it there and renews the lease
as long as the worker's process runs. The worker itself renews it only while its agent is stopped, or where there is no
agent. Whoever is in charge enters the key again if an outage took it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_bamboo.coordination.errors import AnotherRun, CoordinationError, CoordinatorUnavailable, LeaseExpired
from deepspeed_bamboo.coordination.records import EpochRecord
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.core.placement import WorkerId

logger = logging.getLogger(__name__)

LEASE = "lease"  # in the value of the key; a number of the store's
LEASE_SECONDS = "lease_seconds"  # beside it: how long that lease lasts without a renewal
_NO_LEASE = 0
# How often an agent looks whether its worker has entered the key. The worker's settings may have a shorter lease.
_FIRST_LOOK_SECONDS = 0.3
_RETRY_SECONDS = 0.1
_JOIN_SECONDS = 1.0
_ATTEMPTS = 5


@dataclass(frozen=True)
class Conditions:
    """When a key is kept. Each is asked anew at every renewal, from the thread that renews.

    ``in_charge``: whether it is for this process to renew now. ``may_stay`` and ``may_return``: whether the job still
    has the worker, asked after a renewal and after the lease was found to be gone.
    """

    may_stay: Callable[[], bool]
    may_return: Callable[[], bool]
    in_charge: Callable[[], bool]


def conditions_for(
    worker: WorkerId, *, joining: bool, epoch: Callable[[], EpochRecord | None], in_charge: Callable[[], bool]
) -> Conditions:
    """``worker`` stays while the current ``epoch`` has it, or there is none, or it was in none so far.

    One that joins waits for as long as it takes. An epoch in which nobody trains is none for those that start anew.
    """
    joined = threading.Event()

    def now() -> EpochRecord | None:
        current = epoch()
        return None if current is not None and not current.trains and not joined.is_set() else current

    def may_stay() -> bool:
        current = now()
        if current is not None and worker in current.members:
            joined.set()
            return True
        return current is None or not joined.is_set()

    def may_return() -> bool:
        current = now()
        if current is not None and not joining:
            return worker in current.members
        return may_stay()

    return Conditions(may_stay, may_return, in_charge)


def renewal_seconds(value: str | None, *, own_lease_seconds: float) -> float:
    """How long to wait before a renewal: a third of the lease that ``value``, the key's, was entered with.

    That may be shorter than ``own_lease_seconds``, for a worker goes by the settings that its script passes. None: the
    worker has not entered its key yet.
    """
    if value is None:
        return min(own_lease_seconds / 3, _FIRST_LOOK_SECONDS)
    given = json.loads(value).get(LEASE_SECONDS)
    seconds = given if isinstance(given, int | float) and given > 0 else own_lease_seconds
    return min(seconds, own_lease_seconds) / 3


class SharedRegistration:
    """One process's part in keeping ``key``: the worker's own (:meth:`enter`), or its agent's (without a value).

    ``lost`` is set when the job continued without the worker, whose key then must not come back. While
    the store cannot be reached nothing is concluded.
    """

    def __init__(self, store: KeyValueStore, *, key: str, lease_seconds: float, conditions: Conditions) -> None:
        """Nothing happens before :meth:`enter` or :meth:`start`."""
        self.lost = threading.Event()
        self._store = store
        self._key = key
        self._lease_seconds = lease_seconds
        self._conditions = conditions
        self._value: str | None = None  # as last seen or written
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="bamboo-registration", daemon=True)

    def enter(self, value: str) -> None:
        """Write the key with ``value``, a JSON object, under a new lease; under another if that has run out by then.

        Raises CoordinatorUnavailable, or LeaseExpired, when that fails.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            lease = self._store.grant_lease(self._lease_seconds)
            leased = {LEASE: lease, LEASE_SECONDS: self._lease_seconds}
            self._value = json.dumps({**json.loads(value), **leased}, separators=(",", ":"))
            try:
                self._store.put(self._key, self._value, lease=lease)
                return
            except LeaseExpired:
                if attempt == _ATTEMPTS:
                    raise

    def note(self, value: str) -> None:
        """For an agent: the worker has entered the key with ``value``, in case the store loses it at once."""
        if self._value is None:
            self._value = json.dumps({**json.loads(value), LEASE: _NO_LEASE}, separators=(",", ":"))

    def start(self) -> None:
        """Keep the key from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop keeping it. It stays until it is removed or its lease runs out."""
        self._stopped.set()

    def withdraw(self) -> None:
        """Remove the key now and stop keeping it. May be called twice. Its lease is left to run out.

        If the store cannot be reached the key goes with the lease.
        """
        already = self._stopped.is_set()
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        if not already:
            self._remove()

    def _keep(self) -> None:
        pause = renewal_seconds(self._value, own_lease_seconds=self._lease_seconds)
        while not self._stopped.wait(pause):
            if not self._conditions.in_charge():
                # One that was stopped for a moment loses no third of its lease by that.
                pause = self._lease_seconds / 10
                continue
            pause = _RETRY_SECONDS
            try:
                stays = self._renew()
            except AnotherRun as error:
                logger.warning("%s not entered again: %s", self._key, error)
                self.lost.set()  # the key may be another one's by now, so it is left alone
                return
            except CoordinatorUnavailable as error:
                logger.info("%s not renewed: %s", self._key, error)
                continue
            except CoordinationError as error:
                logger.info("%s to be entered again: %s", self._key, error)
                continue
            if not stays:
                self.lost.set()
                self._remove()
                return
            pause = renewal_seconds(self._value, own_lease_seconds=self._lease_seconds)

    def _renew(self) -> bool:
        """Renew or come back; False when the worker is to leave."""
        entry = self._store.get(self._key)
        if entry is not None:
            self._value = entry.value
        if self._value is None:
            return True  # the worker has not come so far yet
        if self._store.keep_alive(int(json.loads(self._value)[LEASE])):
            return entry is None or self._conditions.may_stay()  # without a key: the worker has withdrawn it
        if not self._conditions.may_return():
            return False
        if not self._stopped.is_set():
            self.enter(self._value)
            logger.info("%s registered again after its lease was gone", self._key)
        return True

    def _remove(self) -> None:
        try:
            self._store.delete(self._key)
        except CoordinatorUnavailable as error:
            logger.info("%s left to run out: %s", self._key, error)
