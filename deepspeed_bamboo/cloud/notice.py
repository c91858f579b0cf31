"""The values of this package, and the interface of sources of notices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Literal, Protocol

NoticeKind = Literal["preemption", "maintenance", "rebalance"]
KINDS: tuple[NoticeKind, ...] = ("preemption", "maintenance", "rebalance")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Notice:
    """The cloud's warning before it takes this node.

    ``kind``: ``preemption`` (the node is taken), ``maintenance`` (it is restarted or stopped for
    repairs) or ``rebalance`` (it is more likely than others to be taken soon; nothing is decided).
    ``deadline_seconds``: when the node goes, on this process's ``time.monotonic()``; already past
    means at once. None when the cloud gives no time: always for ``rebalance``; for the other kinds
    it means that the time could not be read, so act at once.
    ``reason``: one sentence for the log. ``source``: where it is from (aws, gcp, azure, scripted, signal).
    """

    kind: NoticeKind
    deadline_seconds: float | None
    reason: str
    source: str

    @property
    def identity(self) -> tuple[str, str, str]:
        """Equal for two readings of one notice: everything but the deadline, which readings round differently."""
        return (self.source, self.kind, self.reason)

    def seconds_left(self, *, now_seconds: float | None = None) -> float | None:
        """Seconds from now (``time.monotonic()`` unless given) to the deadline, at least 0; None without one."""
        if self.deadline_seconds is None:
            return None
        now = time.monotonic() if now_seconds is None else now_seconds
        return max(0.0, self.deadline_seconds - now)


@dataclass(frozen=True)
class Identity:
    """This machine. What could not be found out is ``unknown``; ``cloud`` is then ``none``."""

    instance: str = UNKNOWN
    zone: str = UNKNOWN
    cloud: str = "none"


class NoticeSource(Protocol):
    """Something that can be asked for notices. One thread at a time asks."""

    @property
    def name(self) -> str:
        """What notices carry as their ``source``."""

    @property
    def interval_seconds(self) -> float:
        """How long to wait between two questions while all is well; 0 for a ``poll`` that waits itself."""

    def poll(self, stop: Event) -> Sequence[Notice]:
        """The notices that hold now, the same ones again for as long as they hold.

        Returns nothing when there is none. May wait for news; returns (or raises) within half a second
        of ``stop``. Raises MetadataError when the question could not be answered; asking again is fine.
        """


class MetadataCloud(NoticeSource, Protocol):
    """A cloud with a metadata service, which also knows what machine this is."""

    def identify(self, stop: Event, *, timeout_seconds: float) -> Identity:
        """Ask for instance and zone, waiting at most ``timeout_seconds`` for each answer.

        Raises MetadataError when the service is absent or belongs to another cloud.
        """
