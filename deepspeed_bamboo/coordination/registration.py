"""A key that lives as long as its process: kept alive from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deepspeed_bamboo.coordination.errors import AnotherRun, CoordinationError, CoordinatorUnavailable, LeaseExpired
from deepspeed_bamboo.coordination.store import KeyValueStore

logger = logging.getLogger(__name__)
_RETRY_SECONDS = 0.1
_JOIN_SECONDS = 1.0
_ATTEMPTS = 5
# Of a longer time between two tries the rest is none of the store's: this process, or its machine, stood still.
_LONGEST_TRY_SECONDS = 3.0


class Registration:
    """Holds ``key`` under a lease that is renewed three times in its length, for an agent.

    While the store cannot be reached nothing is concluded. When it can be reached again and the lease is gone the key
    is written again: everybody's lease may be gone then, which is no reason for anybody to leave. Not if the job has
    ended meanwhile: then ``displaced`` has the reason, and nothing is kept any more. Workers' keys
    are kept by :class:`~deepspeed_bamboo.coordination.shared_registration.SharedRegistration`.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        key: str,
        value: str,
        lease_seconds: float,
        may_return: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the key and begin to keep it. Raises CoordinatorUnavailable, or LeaseExpired, when that fails.

        ``may_return`` raises AnotherRun when the key must not come back.
        """
        self.displaced: str | None = None
        self._may_return = may_return
        self._store = store
        self._key = key
        self._value = value
        self._lease_seconds = lease_seconds
        self._stopped = threading.Event()
        self._touched = time.monotonic()
        self._settled = float("-inf")
        self._tried = self._touched
        self._failed_seconds = 0.0  # since the last answer
        self._enter()
        self._thread = threading.Thread(target=self._keep, name="bamboo-registration", daemon=True)
        self._thread.start()

    def settled_for_seconds(self) -> float:
        """How long this process has reached the store without an interruption; 0 while it does not.

        Infinite when there was none since the beginning. After an interruption other processes' leases may
        have run out too, and these processes may be about to return: their absence proves nothing yet.
        """
        now = time.monotonic()
        if now - self._touched > self._patience_seconds():
            return 0.0
        return now - self._settled

    def cut_off_for_seconds(self) -> float:
        """For how long the store was asked in vain. A time in which nobody asked is not counted."""
        return self._failed_seconds

    def withdraw(self) -> None:
        """Remove the key now and stop keeping it. May be called twice.

        If the store cannot be reached the key goes when its lease runs out.
        """
        already = self._stopped.is_set()
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        if not already:
            self._revoke()

    def _enter(self) -> None:
        """Write the key under a new lease, and under another if that has run out by then."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._lease = self._store.grant_lease(self._lease_seconds)
            try:
                self._store.put(self._key, self._value, lease=self._lease)
                return
            except LeaseExpired:
                if attempt == _ATTEMPTS:
                    raise

    def _keep(self) -> None:
        pause = self._lease_seconds / 3
        while not self._stopped.wait(pause):
            try:
                self._renew()
            except AnotherRun as error:
                self.displaced = str(error)
                return
            except CoordinatorUnavailable as error:
                logger.info("%s not renewed: %s", self._key, error)
                self._count_failure()
                pause = _RETRY_SECONDS
                continue
            except CoordinationError as error:
                logger.info("%s to be entered again: %s", self._key, error)
                pause = _RETRY_SECONDS
                continue
            pause = self._lease_seconds / 3

    def _count_failure(self) -> None:
        now = time.monotonic()
        self._failed_seconds += min(now - self._tried, _LONGEST_TRY_SECONDS)
        self._tried = now

    def _patience_seconds(self) -> float:
        """The longest time between two renewals that is no interruption (normal is a third of the lease)."""
        return self._lease_seconds * 0.75

    def _touch(self, *, interrupted: bool) -> None:
        now = time.monotonic()
        if interrupted or now - self._touched > self._patience_seconds():
            self._settled = now
        self._touched = self._tried = now
        self._failed_seconds = 0.0

    def _renew(self) -> None:
        """Renew or come back."""
        if self._store.keep_alive(self._lease):
            self._touch(interrupted=False)
            return
        self._touch(interrupted=True)  # first: whoever sees the key there again must see the interruption, too
        self._may_return()
        self._enter()
        logger.info("%s registered again after its lease was gone", self._key)

    def _revoke(self) -> None:
        try:
            self._store.revoke(self._lease)
        except CoordinatorUnavailable as error:
            logger.info("%s left to run out: %s", self._key, error)
