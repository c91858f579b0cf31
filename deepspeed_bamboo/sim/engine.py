"""The event loop: jumps from one instant at which something changes to the next, completing the steps in between.

At one instant, machines come, are warned, go, and finish booting, in this order; then the policy's own alarm rings;
and a step that would end at that instant ends after all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from .clock import NEVER
from .ledger import Ledger
from .machines import Change, MachineEvent
from .progress import Progress

__all__ = ["Policy", "RunLimits", "simulate"]

# How often, in events, a long run reports how far it is.
_REPORT_EVERY_EVENTS = 1_000


class Policy(ABC):
    """What to do with the machines that there are. Subclasses react to events and drive `progress`.

    Attributes:
        alarm_at: when `alarm` is to be called next; NEVER for not at all.
        wants_step_end: whether `step_ended` is to be called after the step in flight; while it is False the engine
            completes any number of steps at once.
        redundancy_share: the part of running time that recomputes what others compute.
    """

    name: ClassVar[str]

    def __init__(self, progress: Progress, ledger: Ledger) -> None:
        self.progress = progress
        self.ledger = ledger
        self.alarm_at = NEVER
        self.wants_step_end = False
        self.redundancy_share = 0.0

    def added(self, now: int, node: str, zone: str) -> None:  # noqa: B027  optional hook
        """A machine is granted; it is booting."""

    def noticed(self, now: int, node: str) -> None:  # noqa: B027  optional hook
        """A machine will be taken soon."""

    @abstractmethod
    def ready(self, now: int, node: str) -> None:
        """A machine has booted."""

    @abstractmethod
    def removed(self, now: int, node: str) -> None:
        """A machine is gone, booted or not."""

    def settle(self, now: int) -> None:  # noqa: B027  optional hook
        """All that happens to machines at this instant has been told."""

    def alarm(self, now: int) -> None:
        """The time `alarm_at` has come; set the next one."""
        self.alarm_at = NEVER

    def step_ended(self, now: int) -> None:
        """A step has ended, and the next one would begin."""
        self.wants_step_end = False

    def ended(self, now: int) -> None:  # noqa: B027  optional hook
        """The run is over."""


@dataclass(frozen=True)
class RunLimits:
    """When a run ends, besides reaching its target of steps.

    Attributes:
        end_milliseconds: no later than this.
        boot_milliseconds: from a machine's grant until it can be used.
    """

    end_milliseconds: int
    boot_milliseconds: int


def simulate(
    policy: Policy,
    events: Iterator[MachineEvent],
    *,
    limits: RunLimits,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Run a policy to its target of steps or to the end of time; its ledger and progress hold the outcome.

    Args:
        policy: as made for this run; not to be used again.
        events: in order of time, finite or not.
        limits: when to stop.
        report: called now and then with the time and the steps so far.
    """
    _Loop(policy, events, limits, report).run()


class _Loop:
    """One run of the event loop."""

    def __init__(
        self,
        policy: Policy,
        events: Iterator[MachineEvent],
        limits: RunLimits,
        report: Callable[[int, int], None] | None,
    ) -> None:
        self._policy = policy
        self._events = events
        self._limits = limits
        self._report = report
        self._next = next(events, None)
        # Booting takes the same time for all, so machines finish in the order in which they came.
        self._booting: deque[tuple[int, str]] = deque()
        self._count = 0

    def run(self) -> None:
        policy, progress, ledger = self._policy, self._policy.progress, self._policy.ledger
        end = self._limits.end_milliseconds
        while not progress.finished:
            at = min(self._next_external(), policy.alarm_at)
            before = min(at, end + 1)
            if progress.ends_at < before:
                ended = progress.complete(before=before, single=policy.wants_step_end)
                if policy.wants_step_end and not progress.finished:
                    policy.step_ended(ended)
                continue
            if at > end:
                ledger.accrue(end)
                break
            self._deliver(at)
        policy.ended(ledger.now)
        if self._report is not None:
            self._report(ledger.now, progress.steps)

    def _next_external(self) -> int:
        at = self._policy.ledger.price_changes_at
        if self._next is not None and self._next.at_milliseconds < at:
            at = self._next.at_milliseconds
        if self._booting and self._booting[0][0] < at:
            at = self._booting[0][0]
        return at

    def _deliver(self, at: int) -> None:
        policy, ledger = self._policy, self._policy.ledger
        if ledger.price_changes_at == at:
            ledger.change_price(at)
        told = False
        while self._next is not None and self._next.at_milliseconds == at:
            self._tell(self._next)
            self._next = next(self._events, None)
            told = True
        while self._booting and self._booting[0][0] == at:
            _, node = self._booting.popleft()
            # Gone while booting; or gone and back under the same name, which boots again.
            if ledger.started.get(node) == at - self._limits.boot_milliseconds:
                policy.ready(at, node)
                told = True
        if told:
            policy.settle(at)
        if policy.alarm_at == at:
            policy.alarm(at)

    def _tell(self, event: MachineEvent) -> None:
        policy, ledger, at = self._policy, self._policy.ledger, event.at_milliseconds
        if event.change is Change.ADD:
            ledger.add(at, event.node, event.zone)
            policy.added(at, event.node, event.zone)
            self._booting.append((at + self._limits.boot_milliseconds, event.node))
        elif event.change is Change.NOTICE:
            policy.noticed(at, event.node)
        else:
            ledger.remove(at, event.node)
            policy.removed(at, event.node)
        self._count += 1
        if self._report is not None and self._count % _REPORT_EVERY_EVENTS == 0:
            self._report(at, policy.progress.steps)
