"""What this project's policies have in common: workers that register, pauses, and shadows that are being copied."""

from __future__ import annotations

import enum
import heapq
from abc import abstractmethod

from ..clock import NEVER, to_milliseconds
from ..engine import Policy
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..scenario import LiveSpec

__all__ = ["AlarmedPolicy", "Ring", "Status"]


class Ring(enum.IntEnum):
    """What an alarm is for. At one instant in this order."""

    REGISTERED = 0
    COPIED = 1
    RESUME = 2
    LOOK = 3


class Status(enum.Enum):
    """What the job does."""

    WAITING = enum.auto()
    """Too few workers to hold all coordinates, or none yet."""
    PAUSED = enum.auto()
    """An alarm ends the pause."""
    RUNNING = enum.auto()


class AlarmedPolicy(Policy):
    """A policy that waits for workers, for the end of a pause, and for shadows."""

    def __init__(self, progress: Progress, ledger: Ledger, *, spec: LiveSpec) -> None:
        super().__init__(progress, ledger)
        self._spec = spec
        self._zones: dict[str, str] = {}
        self._rings: list[tuple[int, Ring, str]] = []
        self._status = Status.WAITING
        self._copying_until = 0
        self._resume_at = NEVER

    @abstractmethod
    def _is_member(self, node: str) -> bool:
        """Whether the job has taken `node` in."""

    @abstractmethod
    def _register(self, now: int, node: str) -> None:
        """`node` is there, and is no member yet."""

    @abstractmethod
    def _copied(self) -> None:
        """The last shadow that was being copied is there."""

    def _look_again(self, now: int) -> None:
        """What was put off is due for another look."""

    @abstractmethod
    def _resume(self, now: int) -> None:
        """A pause is over."""

    def _ring(self, at: int, kind: Ring, node: str = "") -> None:
        heapq.heappush(self._rings, (at, kind, node))
        self.alarm_at = self._rings[0][0]

    def _copy_until(self, at: int) -> None:
        """Shadows are being copied until then."""
        self._copying_until = at
        self._ring(at, Ring.COPIED)

    def _pause(self, now: int, seconds: float) -> None:
        self._status = Status.PAUSED
        self.ledger.enter(now, Mode.PAUSED)
        self._resume_at = now + to_milliseconds(seconds)
        self._ring(self._resume_at, Ring.RESUME)

    def added(self, now: int, node: str, zone: str) -> None:
        """See Policy."""
        self._zones[node] = zone

    def ready(self, now: int, node: str) -> None:
        """See Policy: the process starts, while the others train."""
        self._ring(now + to_milliseconds(self._spec.join_seconds), Ring.REGISTERED, node)

    def alarm(self, now: int) -> None:
        """See Policy."""
        while self._rings and self._rings[0][0] == now:
            _, kind, node = heapq.heappop(self._rings)
            if kind is Ring.REGISTERED and node in self._zones and not self._is_member(node):
                self._register(now, node)
            elif kind is Ring.COPIED and now >= self._copying_until:
                self._copied()
            elif kind is Ring.RESUME and now == self._resume_at:
                self._resume(now)
            elif kind is Ring.LOOK:
                self._look_again(now)
        self.alarm_at = self._rings[0][0] if self._rings else NEVER
