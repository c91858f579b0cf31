"""The two sides of a connection find each other here, with one question to the guarded store that they share.

Gloo writes its address here, and asks for its own and the other's, each twice. Only the first question for the
other's leaves the process. In front of each value is the number from which the pass words are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.pass_words import NONCE_BYTES, PassWords


class SharedStore(Protocol):
    """What both sides see; StoreServer and StoreClient."""

    def set(self, key: str, value: bytes) -> None:
        """Keep ``value`` under ``key``."""

    def fetch(self, key: str, *, within_seconds: float) -> bytes:
        """The value of ``key``. Raises RuntimeError or TimeoutError when there is none by then."""


class PairStore(c10d.Store):  # type: ignore[misc,name-defined]
    """torch's Store for one connection, which it asks for nothing else.

    Args:
        shared: see :class:`SharedStore`.
        name: of this connection; no other ever has it.
        pass_words: this side's; they hear the other's number here.
        wait_seconds: how long the other side is waited for, whatever gloo's own limit.
    """

    def __init__(self, shared: SharedStore, *, name: str, pass_words: PassWords, wait_seconds: float) -> None:
        super().__init__()
        self._shared, self._name, self._pass_words = shared, name, pass_words
        self._wait = timedelta(seconds=wait_seconds)
        self._values: dict[str, bytes] = {}
        self.met = False
        """True once the other side has been here."""

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = content
        self._shared.set(f"{self._name}/{key}", self._pass_words.nonce + content)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            full = f"{self._name}/{key}"
            try:
                content = self._shared.fetch(full, within_seconds=self._wait.total_seconds())
            except TimeoutError as error:
                raise c10d.DistStoreError(str(error)) from error
            self._pass_words.hear(content[:NONCE_BYTES])
            self._values[key] = content[NONCE_BYTES:]
            self.met = True
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        self.wait(keys)
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Of no effect: see ``wait_seconds``."""

    @property
    def timeout(self) -> timedelta:
        return self._wait

    def has_extended_api(self) -> bool:
        return False

    hasExtendedApi: Any = has_extended_api  # noqa: N815
