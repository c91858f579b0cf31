"""What an agent's state machine knows about its slot and its job, and steps that many of its decisions share."""

from __future__ import annotations

import signal

from deepspeed_bamboo.coordination import EpochRecord, JobFailure, Member
from deepspeed_bamboo.coordination.records import FailureKind
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.decisions import (
    Action,
    EndWorker,
    Fail,
    KillWorker,
    LauncherGone,
    Say,
    WakeAfter,
    WorkerExited,
)
from deepspeed_bamboo.elastic.gathering import Gathering
from deepspeed_bamboo.elastic.interruptions import by_lost_launcher
from deepspeed_bamboo.elastic.own import Own
from deepspeed_bamboo.elastic.rules import Entry, Rules
from deepspeed_bamboo.elastic.slot import Slot

LAUNCHER = "launcher gone"
_WAIT_FOR_NOTICE_SECONDS = 3.0


class SlotState:
    """The state of one slot and what it knows of its job."""

    def __init__(self, slot: Slot, *, lease_seconds: float, rules: Rules | None = None) -> None:
        self._slot = slot
        self._lease_seconds = lease_seconds
        self._rules = rules or Rules()
        self._generation = 0
        self._next_generation = 0
        self._attempt = 0  # how many workers this slot has replaced since the job began
        self._spared = 0  # how many of these were ended only to start anew with others
        self._joining = self._rules.entry is not Entry.START
        self._join_due = self._joining
        self._own = Own.WAITING if self._joining else Own.RUNNING
        self._synced = False  # whether all that there was has been told
        self._draining = False
        self._stopping = False
        self._exit: WorkerExited | None = None  # of an unexplained end
        self._epoch: EpochRecord | None = None
        self._was_member = False
        self._gathering = Gathering(slot, entry=self._rules.entry)
        self._members: dict[WorkerId, Member] = {}
        self._ended: dict[WorkerId, int] = {}  # -> generation
        self._drained: set[WorkerId] = set()
        self._failure: JobFailure | None = None
        self._finished = False
        self._offered: JobFailure | None = None  # the failure that this agent wants recorded, or has recorded
        self._offer_pending = False
        self._code_if_interrupted: int | None = None  # by the first signal that this agent was sent
        self._leaves_alone: int | None = None  # with this code
        self._launcher_gone: LauncherGone | None = None
        self._left = False

    @property
    def worker(self) -> WorkerId:
        """The id of the current worker."""
        return self._slot.worker(generation=self._generation, attempt=self._attempt)

    @property
    def finished(self) -> bool:
        """Whether the job is complete."""
        return self._finished

    @property
    def failure(self) -> JobFailure | None:
        """Why the job ended, if it failed."""
        return self._failure

    @property
    def drained(self) -> bool:
        """Whether this node was drained, so that the job continues elsewhere."""
        return self._own is Own.DRAINED or self._draining

    @property
    def _over(self) -> bool:
        return self._finished or self._failure is not None

    def _was_expelled(self) -> bool:
        """Whether the job has continued without the worker, even where no epoch that had it was heard of here."""
        epoch = self._epoch
        if epoch is None or self.worker in epoch.members:
            return False
        # Who starts with the others is in the first epoch of its generation.
        started = not self._joining and epoch.trains and epoch.generation == self._generation
        return self._was_member or self.worker in epoch.lost or started

    def _end_expelled(self) -> list[Action]:
        reason = "" if self._epoch is None else f" ({self._epoch.reason})"
        return [
            Say(f"the job continues without worker {self.worker}{reason}; ending it"),
            KillWorker("the job continues without it"),
        ]

    def _end_before_training(self, kind: FailureKind, message: str) -> list[Action]:
        """End the job, for all, if it has no epoch yet and this agent acts for it."""
        if not self._gathering.acts or self._over or self._offered is not None:
            return []
        failure = JobFailure(worker=self.worker, kind=kind, message=message, traceback="")
        return [*self._offer(failure), *self._end_worker()]

    def _interrupt(self, message: str, number: int) -> list[Action]:
        """End the job, as signal ``number`` does, unless it ends already."""
        if self._code_if_interrupted is None:
            self._code_if_interrupted = 128 + number  # also when it is known from another that the job is interrupted
        if self._failure is not None or self._offered is not None:
            return self._end_worker()
        failure = JobFailure(worker=self.worker, kind="interrupted", message=message, traceback="")
        return [*self._offer(failure), *self._end_worker()]

    def _on_launcher_gone(self, event: LauncherGone) -> list[Action]:
        """The launcher, or the command above it, has ended, and this slot ends, too.

        A machine that shuts down sends all its processes SIGTERM. Where that is a notice, the agent may hear of the
        launcher's end first; the worker then leaves as for any notice.
        """
        self._launcher_gone = event
        if signal.SIGTERM in self._rules.notice_signals and not self._draining:
            return [WakeAfter(_WAIT_FOR_NOTICE_SECONDS, LAUNCHER)]
        return self._end_without_launcher()

    def _end_without_launcher(self) -> list[Action]:
        event, noticed = self._launcher_gone, self._draining and signal.SIGTERM in self._rules.notice_signals
        if event is None or noticed or (self._finished and self._own is not Own.RUNNING):
            return []
        if self._rules.entry is not Entry.JOIN and (event.command or self._slot.one_machine):
            return self._interrupt(by_lost_launcher(event.pid), signal.SIGHUP)
        reason = "its launcher is gone, which counts as the loss of this node"
        return self._leave_alone(reason, code=128 + signal.SIGHUP)

    def _leave_alone(self, reason: str, *, code: int) -> list[Action]:
        """This slot leaves the job, which goes on."""
        if self._leaves_alone is not None:
            return []
        self._leaves_alone = code
        return [KillWorker(reason)] if self._own is Own.RUNNING else []

    def _offer(self, failure: JobFailure) -> list[Action]:
        self._offered, self._offer_pending = failure, True
        return [Fail(failure)]

    def _end_worker(self) -> list[Action]:
        if self._own in (Own.RUNNING, Own.REPLACED, Own.RENEWED):
            self._own = Own.ENDING
            return [EndWorker()]
        if self._own is Own.UNEXPLAINED:
            self._own = Own.LOST
        return []
