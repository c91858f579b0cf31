"""An agent's reactions to events: a state machine without clock, process or network.

Every decision is made here and explains itself in the reason it carries. The agent (``agent.py``)
feeds it events one by one and carries out the actions it returns, in order.
"""

from __future__ import annotations

import signal

from deepspeed_bamboo.coordination import Change, Drain, EpochRecord, JobFailure, Member
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.anew import AnewSlot
from deepspeed_bamboo.elastic.assembly import EVERYBODY, MACHINES
from deepspeed_bamboo.elastic.decisions import (
    Action,
    Changed,
    CheckSuspect,
    CheckVanished,
    CoordinatorGone,
    EndWorker,
    Event,
    FailureRecorded,
    Finish,
    ForgetDrain,
    KillWorker,
    LauncherGone,
    Leave,
    LossSettled,
    MarkEnded,
    ReportLoss,
    RequestDrain,
    Say,
    Signalled,
    SlotsChecked,
    StartWorker,
    Stuck,
    Suspected,
    WakeAfter,
    WentOn,
    Withdraw,
    Woken,
    WorkerExited,
    how_it_ended,
    signal_name,
)
from deepspeed_bamboo.elastic.error_report import last_line
from deepspeed_bamboo.elastic.gathering import GONE, MISSING
from deepspeed_bamboo.elastic.interruptions import before_training, by_signal
from deepspeed_bamboo.elastic.own import Own
from deepspeed_bamboo.elastic.replacing import RESTART
from deepspeed_bamboo.elastic.rules import TOLD_BY_ONE, Entry, exit_code
from deepspeed_bamboo.elastic.slot_state import LAUNCHER
from deepspeed_bamboo.elastic.standing_still import ending, in_words, on_stuck, on_went_on
from deepspeed_bamboo.elastic.wording import of_drain, of_early_end, of_loss
from deepspeed_bamboo.protocol import EXIT_DRAINED, EXIT_EXPELLED, EXIT_JOB_FAILED, EXIT_TRY_AGAIN

# Whoever signals a process tree reaches the worker a moment before its agent.
_SIGNALS_OF_THE_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WAIT_FOR_OWN_SIGNAL_SECONDS = 0.3
_WAIT_FOR_FAILURE_SECONDS = 2.0
_WAIT_FOR_EPOCH_SECONDS = 2.0


class Supervisor(AnewSlot):
    """The decisions of one slot's agent."""

    def start(self) -> list[Action]:
        """The first thing to do."""
        first = [] if self._own is Own.WAITING else [StartWorker(self.worker, self._generation)]
        return [*first, *self._gathering.start()]

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow ``event``; none after it has returned a Leave."""
        if self._left:
            return []
        if isinstance(event, WorkerExited):
            actions = self._on_exit(event)
        elif isinstance(event, Changed):
            actions = self._on_change(event.change)
        elif isinstance(event, Signalled):
            actions = self._on_signal(event.number)
        elif isinstance(event, LauncherGone):
            actions = self._on_launcher_gone(event)
        elif isinstance(event, CoordinatorGone):
            actions = self._on_coordinator_gone(event)
        elif isinstance(event, LossSettled):
            actions = self._on_loss_settled(event)
        elif isinstance(event, SlotsChecked):
            actions = self._on_slots_checked(event)
        elif isinstance(event, FailureRecorded):
            actions = self._on_failure_recorded(event)
        elif isinstance(event, Suspected):
            actions = self._suspect(event.worker, event.reason)
        elif isinstance(event, Stuck | WentOn):
            actions = self._on_pulse(event)
        else:
            actions = self._on_woken(event)
        return actions + self._leave_if_done()

    # -- the own worker ----------------------------------------------------------------------------

    def _on_exit(self, event: WorkerExited) -> list[Action]:
        if event.worker != self.worker or self._own not in (Own.RUNNING, Own.ENDING, Own.REPLACED, Own.RENEWED):
            return []
        if self._own in (Own.REPLACED, Own.RENEWED):
            return self._on_ended_to_start(event)
        if self._own is Own.ENDING or self._failure is not None:
            self._own = Own.LOST
            return [Withdraw(event.worker)]
        if event.code == 0:
            return self._on_end_of_script(event)
        if event.code == EXIT_DRAINED:
            return self._on_left_node(event)
        if self._was_expelled():
            return self._on_expelled(event)
        if event.code == EXIT_EXPELLED:
            seconds = _WAIT_FOR_EPOCH_SECONDS if self._joining else self._rules.expulsion_seconds
            return self._wait_for_explanation(event, seconds)  # which is the epoch that says so, too
        if self._starts_anew and event.code > 0:  # another may have been lost, which is known with its lease
            return self._wait_for_explanation(event, self._lease_seconds + _WAIT_FOR_EPOCH_SECONDS)
        if event.code < 0 and self._finished:
            return [
                Say(f"worker {event.worker} {how_it_ended(event.code)} after the job was complete"),
                *self._on_end_of_script(event),
            ]
        if event.code < 0 and -event.code in _SIGNALS_OF_THE_END:
            return self._wait_for_explanation(event, _WAIT_FOR_OWN_SIGNAL_SECONDS)
        if event.code == EXIT_JOB_FAILED and not event.report:
            return self._wait_for_explanation(event, _WAIT_FOR_FAILURE_SECONDS)
        return self._conclude(event)

    def _on_expelled(self, event: WorkerExited) -> list[Action]:
        if self._epoch is not None and not self._epoch.trains:
            return self._on_renewed(event)
        self._own = Own.LOST
        return [Withdraw(event.worker), *self._plan_restart()]

    def _wait_for_explanation(self, event: WorkerExited, seconds: float) -> list[Action]:
        self._own, self._exit = Own.UNEXPLAINED, event
        return [WakeAfter(seconds, "explanation")]

    def _conclude(self, event: WorkerExited) -> list[Action]:
        """Take the exit for what it looks like: a signal is a lost node, everything else the script's own error."""
        if event.code < 0 and self._leaves_alone is not None and self._epoch is None:
            self._own = Own.LOST
            return [Withdraw(event.worker)]  # without this slot the others need not start again
        if event.code < 0:
            return self._lose(event, f"its process {how_it_ended(event.code)}")
        if event.code == EXIT_DRAINED and self._draining:
            self._own = Own.LOST
            return [ReportLoss(event.worker, "it left before its part was taken over", self._generation)]
        if event.code == EXIT_EXPELLED and self._joining:
            return self._lose(event, "it found that it has no part in the job")
        report = event.report or f"(no traceback: the process {how_it_ended(event.code)})"
        if self._joining and not self._was_member:
            self._own = Own.UNFIT
            text = f"worker {event.worker} could not join, the job continues without it: {report}"
            return [Withdraw(event.worker), Say(text)]
        self._own = Own.FAILED
        message = f"worker {event.worker} (rank {self._slot.rank}) {how_it_ended(event.code)}: {last_line(report)}"
        failure = JobFailure(worker=event.worker, kind="user_error", message=message, traceback=report)
        return self._offer(failure)

    def _lose(self, event: WorkerExited, why: str) -> list[Action]:
        self._own = Own.LOST
        return [ReportLoss(event.worker, why, self._generation), *self._plan_restart()]

    def _on_end_of_script(self, event: WorkerExited) -> list[Action]:
        self._own = Own.ENDED
        return [MarkEnded(event.worker, self._generation)]

    def _on_left_node(self, event: WorkerExited) -> list[Action]:
        """It left because its node is to be left; the epoch without it may not be known here yet."""
        if self._epoch is not None and self.worker in self._epoch.members:
            return self._wait_for_explanation(event, _WAIT_FOR_EPOCH_SECONDS)
        self._own, self._exit = Own.DRAINED, None
        return [
            Say(f"worker {event.worker} has left; the job continues without it, and nothing is lost"),
            MarkEnded(event.worker, self._generation, drained=True),
            ForgetDrain(self._slot.node),
        ]

    # -- joining a job that runs -------------------------------------------------------------------

    def _plan_restart(self) -> list[Action]:
        """After a loss: replace the worker in a while, if it may be replaced."""
        return [] if self._leaves_alone is not None else self._replace_later()

    def _join_if_due(self) -> list[Action]:
        """Start a worker that joins, once the job runs and has settled the loss of the one before."""
        if not self._join_due or not self._synced or self._own not in (Own.WAITING, Own.LOST):
            return []
        if self._rules.entry is Entry.JOIN and self._epoch is None and self._own is Own.WAITING:
            self._leaves_alone = EXIT_TRY_AGAIN
            return [Say("the job has ended before this machine could join it")]
        if self._epoch is not None and not self._epoch.trains:
            return self._offer_if_due()
        if self._epoch is None or self._over or self._stopping or self._draining or self._leaves_alone is not None:
            return []
        if self._own is Own.LOST:
            if self.worker in self._epoch.members:
                return []
            self._attempt += 1
        self._generation = self._next_generation
        self._join_due, self._joining, self._was_member, self._own = False, True, False, Own.RUNNING
        return [StartWorker(self.worker, self._generation, joining=True)]

    def _on_drain(self, drain: Drain | None) -> list[Action]:
        """The own node is to be left, or (None) not any more."""
        before, self._draining = self._draining, drain is not None
        if drain is None or before or self._over:
            return self._join_if_due()
        actions: list[Action] = []
        if self._slot.local_rank == 0:
            actions = [Say(of_drain(drain, comes=self._rules.entry is Entry.JOIN and self._own is Own.WAITING))]
        if self._own is Own.RUNNING and self._joining and not self._was_member:
            self._own = Own.ENDING  # it has nothing that others need, and will be given nothing any more
            actions.append(EndWorker())
        return actions

    # -- the job -----------------------------------------------------------------------------------

    def _on_change(self, change: Change) -> list[Action]:
        if change.kind == "epoch" and isinstance(change.value, EpochRecord):
            return self._on_epoch(change.value)
        if change.kind == "member":
            return self._on_member(change.worker, change.value)
        if change.kind == "ended" and change.value is not None:
            if change.value.get("drained"):
                self._drained.add(change.worker)
                return []
            self._ended[change.worker] = int(change.value.get("generation", 0))
            return self._finish_if_all_ended()
        if change.kind == "generation" and change.value is not None:
            return self._on_generation(int(change.value))
        if change.kind == "suspicion" and change.value is not None:
            return self._on_suspicion(change)
        if change.kind == "failure" and isinstance(change.value, JobFailure):
            return self._on_failure(change.value)
        if change.kind == "finished" and change.value is not None:
            return self._on_finished()
        if change.kind == "drain" and change.worker == self._slot.node:
            return self._on_drain(change.value)
        if change.kind == "agent":
            return self._on_agent(int(change.worker), change.value)
        if change.kind == "progress" and change.value is not None:
            self._assembly.note_offer(change.epoch, change.value)
            return self._start_if_complete()
        if change.kind == "stop" and change.value is not None:
            self._stopping = True
            if self._epoch is not None and self._epoch.waits:
                return self._stop_waiting()
            return self._end_before_training("stopped", before_training(change.value))
        if change.kind == "hang":
            return self._on_hang(change)
        if change.kind == "resync":
            self._synced = True
            return self._join_if_due()
        return []

    def _on_finished(self) -> list[Action]:
        self._finished = True
        if self._own is Own.RUNNING and self._joining and not self._was_member:
            self._own = Own.ENDING  # it came too late
            return [EndWorker()]
        return []

    def _on_epoch(self, epoch: EpochRecord) -> list[Action]:
        self._epoch = epoch
        actions = self._gathering.end(epoch, self._members)
        if self.worker in epoch.members:
            self._was_member = True
        if epoch.trains and self._was_expelled() and self._own is Own.RUNNING and self._failure is None:
            # One that was not lost leaves by itself, as it was asked to.
            sure = self.worker in epoch.lost
            actions += self._end_expelled() if sure else [WakeAfter(self._lease_seconds, "expelled")]
        if self._own is Own.UNEXPLAINED and self._exit is not None and self._exit.code == EXIT_DRAINED:
            actions += self._on_left_node(self._exit) if self.worker not in epoch.members else []
        if self._own is Own.UNEXPLAINED and self._exit is not None and self._exit.code == EXIT_EXPELLED:
            actions += self._on_expelled(self._exit) if self._was_expelled() else []
        if not epoch.trains:
            return actions + self._on_idle_epoch(epoch)
        self._next_generation = max(self._next_generation, epoch.generation)
        absent = [worker for worker in epoch.members if worker not in self._members and worker != self.worker]
        if absent and not self._finished:
            actions.append(WakeAfter(self._lease_seconds, "absent"))
        return actions + self._join_if_due() + self._finish_if_all_ended()

    def _on_member(self, worker: WorkerId, member: Member | None) -> list[Action]:
        if member is not None:
            self._members[worker] = member
            return []
        self._members.pop(worker, None)
        return self._check_if_missed(worker)

    def _check_if_missed(self, worker: WorkerId) -> list[Action]:
        """A member that is not there, and that nobody has explained, may be lost."""
        if self._epoch is None or worker not in self._epoch.members:
            return []
        explained = worker in self._ended or worker in self._drained or self._over
        own = worker == self.worker and self._own is not Own.RUNNING
        return [] if explained or own else [CheckVanished(worker)]

    def _on_suspicion(self, change: Change) -> list[Action]:
        return self._suspect(change.worker, change.value["reason"]) if change.value["reporter"] == self.worker else []

    def _suspect(self, suspect: WorkerId, reason: str) -> list[Action]:
        if self._over or self._offered is not None or (self._epoch is not None and suspect in self._epoch.lost):
            return []
        if suspect in self._ended:
            message = of_early_end(suspect, reporter=self.worker, reason=reason)
            return self._offer(JobFailure(worker=suspect, kind="user_error", message=message, traceback=""))
        return [CheckSuspect(suspect, reason)]

    def _finish_if_all_ended(self) -> list[Action]:
        if self._finished or self._failure is not None or not self._ended:
            return []
        if self._epoch is not None and not self._epoch.trains:
            return []
        if self._epoch is None:
            current = [worker for worker, generation in self._ended.items() if generation == self._generation]
            complete = len(current) >= self._slot.workers
        else:
            complete = all(worker in self._ended for worker in self._epoch.members)
        return [Finish("every worker has ended its script")] if complete else []

    def _on_pulse(self, event: Stuck | WentOn) -> list[Action]:
        if event.worker != self.worker or self._own is not Own.RUNNING or self._over:
            return []
        if isinstance(event, WentOn):
            return on_went_on(event)
        actions = on_stuck(event, self._slot, action=self._rules.hangs.action)
        if self._rules.hangs.action == "end" and event.hang.is_fault and self._offered is None:
            actions += [*self._offer(ending(event, self._slot)), *self._end_worker()]
        return actions

    def _on_hang(self, change: Change) -> list[Action]:
        """Whoever looks at the output of the worker that reports for all finds it there, too."""
        reports = self._epoch is not None and self._epoch.members[:1] == (self.worker,)
        if change.value is None or change.worker == self.worker or not reports:
            return []
        return [Say(in_words(change.worker, change.value))]

    # -- the end -----------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> list[Action]:
        if self._finished and self._own is not Own.RUNNING:
            return []
        name = signal_name(number)
        if number in self._rules.notice_signals:
            reason = f"{name} was sent to the agent of rank {self._slot.rank}"
            return [RequestDrain(self._slot.node, self._rules.grace_seconds, reason)]
        if self._rules.entry is Entry.JOIN:
            return self._leave_alone(f"{name} was sent to its agent", code=128 + number)
        if number == signal.SIGINT and self._own is Own.ENDING and (self._failure or self._offered):
            return [KillWorker("interrupted twice")]
        return self._interrupt(by_signal(number, self._slot), number)

    def _on_slots_checked(self, event: SlotsChecked) -> list[Action]:
        if self._epoch is not None:
            return self._on_roster_checked(event)
        reason = self._gathering.checked(event.absent)
        return self._gathering.go_on() if reason is None else self._end_before_training("slots_lost", reason)

    def _on_coordinator_gone(self, event: CoordinatorGone) -> list[Action]:
        """Nothing can be recorded any more, so each agent ends on its own."""
        self._offer_pending = False
        if self._failure is not None or (self._finished and self._own is not Own.RUNNING):
            return []
        self._failure = JobFailure(worker=self.worker, kind="no_coordinator", message=event.reason, traceback="")
        return [Say(f"the job ends: {event.reason}", once=True), *self._end_worker()]

    def _on_failure(self, failure: JobFailure) -> list[Action]:
        known, self._failure = self._failure, failure
        if known is not None:
            return []
        told_here = failure.kind in TOLD_BY_ONE and self._slot.one_machine  # by the agent that recorded it
        actions: list[Action] = []
        if failure.worker == self.worker and failure.kind == "user_error" and self._offered != failure:
            # The worker has told the job itself; its agent is still the one to show it.
            text = f"worker {failure.worker} (rank {self._slot.rank}) failed: {failure.message}\n{failure.traceback}"
            actions.append(Say(f"the job ends: {text}".rstrip()))
        elif self._offered != failure and self._slot.local_rank == 0 and not told_here:
            actions.append(Say(f"the job ends: {failure.message} (worker {failure.worker})"))
        return actions + self._end_worker()

    def _on_failure_recorded(self, event: FailureRecorded) -> list[Action]:
        self._offered, self._offer_pending = (event.failure if event.first else None), False
        actions: list[Action] = []
        if event.first and self._failure is None:
            self._failure = event.failure
        if event.first and event.failure.kind == "user_error":
            actions.append(Say(f"the job ends: {event.failure.message}\n{event.failure.traceback}".rstrip()))
        elif event.first and event.failure.kind in TOLD_BY_ONE:
            actions.append(Say(f"the job ends: {event.failure.message}", once=True))
        if not event.first and self._own is Own.FAILED and self._epoch is not None and not self._epoch.trains:
            actions += self._lose_failed()
        return actions + (self._end_worker() if event.first else [])

    def _on_loss_settled(self, event: LossSettled) -> list[Action]:
        return [] if self._failure is not None else [Say(text) for text in of_loss(event)]

    def _on_woken(self, event: Woken) -> list[Action]:
        if event.reason == "explanation" and self._own is Own.UNEXPLAINED and self._exit is not None:
            exited, self._exit = self._exit, None
            return self._conclude(exited)
        if event.reason.startswith((MACHINES, EVERYBODY)):
            return self._on_time_over(event.reason)
        if event.reason == GONE and self._epoch is not None:
            return self._check_roster()
        if event.reason in (GONE, MISSING):
            return [] if self._over or self._offered else self._gathering.woken(event.reason)
        if event.reason == LAUNCHER:
            return self._end_without_launcher()
        if event.reason == RESTART and self._own is Own.LOST:
            self._join_due = True
            return self._join_if_due()
        if event.reason == "expelled" and self._own is Own.RUNNING and self._was_expelled():
            return [] if self._draining or self._failure is not None else self._end_expelled()
        if event.reason == "absent" and self._epoch is not None:
            absent = [worker for worker in self._epoch.members if worker not in self._members]
            return [action for worker in absent for action in self._check_if_missed(worker)]
        return []

    def _leave_if_done(self) -> list[Action]:
        if self._offer_pending or self._own in (Own.RUNNING, Own.ENDING, Own.REPLACED, Own.RENEWED, Own.UNEXPLAINED):
            return []
        if self._failure is not None:
            code = exit_code(self._failure.kind, if_interrupted=self._code_if_interrupted)
        elif self._finished or self._own is Own.DRAINED:
            code = 0
        elif self._leaves_alone is not None:
            code = self._leaves_alone
        elif self._own is Own.UNFIT and self._rules.entry is Entry.JOIN and self._slot.world_size == 1:
            code = 1
        elif self._own in (Own.WAITING, Own.LOST) and self._draining:
            code = 0
        else:
            return []
        self._left = True
        unused = self._own in (Own.WAITING, Own.LOST)
        forget = [ForgetDrain(self._slot.node)] if self._draining and unused else []
        return [*forget, Leave(code)]
