"""The interface of the key-value store that coordination uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Entry:
    """One key. ``revision`` is the store's revision of its last change; 0 stands for an absent key."""

    key: str
    value: str
    revision: int


@dataclass(frozen=True)
class Snapshot:
    """The entries under a prefix, in key order, all as of the store's ``revision``."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class StoreEvent:
    """``put`` and ``delete`` of one key, or ``resync``: events may have been missed, so read again."""

    kind: Literal["put", "delete", "resync"]
    key: str = ""
    value: str = ""
    revision: int = 0


class WatchHandle(Protocol):
    """A running watch."""

    def stop(self) -> None:
        """End the watch. No callback begins after this returns, unless called from the callback itself."""


class KeyValueStore(Protocol):
    """Every call is bounded in time and raises CoordinatorUnavailable when the store gave no answer."""

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``, or None. Never an older state than one this process has seen."""

    def read(self, prefix: str) -> Snapshot:
        """All entries whose key begins with ``prefix``."""

    def put(self, key: str, value: str, *, lease: int | None = None) -> None:
        """Write; with a lease the key vanishes with it. Raises LeaseExpired when that is gone already."""

    def compare_and_swap(
        self, key: str, value: str, *, revision: int, lease: int | None = None, guard: tuple[str, int] | None = None
    ) -> bool:
        """Write if the key is still at ``revision`` (0: absent); False if not. Raises LeaseExpired.

        ``guard``: another key and the revision that it must be at, too.
        """

    def delete(self, key: str) -> bool:
        """Remove ``key``; False when it was not there."""

    def delete_prefix(self, prefix: str) -> int:
        """Remove every key under ``prefix``; how many there were."""

    def watch(self, prefix: str, on_event: Callable[[StoreEvent], None]) -> WatchHandle:
        """Call ``on_event`` from one thread, in order; ``resync`` comes first, and after every interruption."""

    def grant_lease(self, seconds: float) -> int:
        """A new lease, which expires unless kept alive at least that often."""

    def keep_alive(self, lease: int) -> bool:
        """Renew ``lease``; False when it is gone."""

    def revoke(self, lease: int) -> None:
        """End ``lease`` and remove its keys, if it still exists."""

    def compact(self) -> None:
        """Forget all values that were replaced up to now, under whatever keys. Raises CoordinatorUnavailable."""

    def close(self) -> None:
        """End all watches and connections."""
