"""An agent's decisions while nobody trains.

Before the first epoch there is nothing to lose: all workers start again. Later the agents wait for machines, and their
workers start anew, from the newest checkpoint, with whoever is there.
"""

from __future__ import annotations

from deepspeed_bamboo.coordination import AgentRecord, EpochRecord, JobFailure
from deepspeed_bamboo.elastic.assembly import EVERYBODY, MACHINES, Assembly, seat_of, seconds_to_offer
from deepspeed_bamboo.elastic.decisions import (
    Action,
    AssembleAgain,
    CheckSlots,
    KillWorker,
    OfferSlot,
    Say,
    SlotsChecked,
    StartAnew,
    StartWorker,
    WakeAfter,
    Withdraw,
    WorkerExited,
)
from deepspeed_bamboo.elastic.own import Own
from deepspeed_bamboo.elastic.replacing import replace_later
from deepspeed_bamboo.elastic.rules import Rules
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.slot_state import SlotState
from deepspeed_bamboo.elastic.wording import numbered


class AnewSlot(SlotState):
    """The part of an agent's state machine that follows an epoch in which nobody trains (``EpochRecord.trains``)."""

    def __init__(self, slot: Slot, *, lease_seconds: float, rules: Rules | None = None) -> None:
        super().__init__(slot, lease_seconds=lease_seconds, rules=rules)
        self._assembly = Assembly()

    # -- starting over, before there is anything to lose -------------------------------------------

    def _on_ended_to_start(self, event: WorkerExited) -> list[Action]:
        """The own worker was killed so that another can start."""
        return self._on_renewed(event) if self._own is Own.RENEWED else [Withdraw(event.worker), *self._start_again()]

    def _on_generation(self, generation: int) -> list[Action]:
        if generation <= self._next_generation or self._failure is not None:
            return []
        self._next_generation = generation
        if self._own in (Own.WAITING, Own.REPLACED):
            return []
        if self._own is Own.RUNNING:
            self._own = Own.REPLACED
            return [KillWorker(f"all workers start again (attempt {generation + 1})")]
        self._exit = None
        return [Withdraw(self.worker), *self._start_again()]

    def _start_again(self) -> list[Action]:
        self._generation = self._next_generation
        self._own = Own.RUNNING
        return [StartWorker(self.worker, self._generation)]

    # -- starting anew ---------------------------------------------------------------------------

    def _on_agent(self, slot: int, agent: AgentRecord | None) -> list[Action]:
        self._assembly.note_agent(slot, there=agent is not None)
        return [*self._gathering.note(slot, agent), *self._start_if_complete(), *self._check_roster()]

    def _on_idle_epoch(self, epoch: EpochRecord) -> list[Action]:
        """Agents wait, or the workers of a roster start. A worker that is left of those before ends."""
        actions: list[Action] = []
        if self._own is Own.RUNNING and self._failure is None and (epoch.waits or epoch.generation != self._generation):
            self._own = Own.RENEWED
            actions = [KillWorker("all workers start anew")]
        return actions + (self._on_waiting(epoch) if epoch.waits else self._on_roster(epoch))

    @property
    def _starts_anew(self) -> bool:
        """Whether the own worker is one of those that start anew and do not train yet."""
        return self._epoch is not None and not self._epoch.trains and self._epoch.generation == self._generation

    def _on_renewed(self, event: WorkerExited) -> list[Action]:
        """That it ended was no fault of its slot, which may replace workers as often as before."""
        self._own = Own.LOST
        self._spared += 1
        return [Withdraw(event.worker), *([] if self._leaves_alone is not None else self._replace_later())]

    def _replace_later(self) -> list[Action]:
        return replace_later(self._rules, self.worker, attempt=max(0, self._attempt - self._spared))

    def _on_waiting(self, epoch: EpochRecord) -> list[Action]:
        self._assembly.begin(epoch)
        actions: list[Action] = [
            WakeAfter(epoch.waits_seconds, f"{MACHINES}{epoch.number}"),
            WakeAfter(seconds_to_offer(self._rules, lease_seconds=self._lease_seconds), f"{EVERYBODY}{epoch.number}"),
        ]
        if self._slot.local_rank == 0:
            text = f"nobody is left who can train ({epoch.reason}); waiting {epoch.waits_seconds:g} s for machines"
            actions.append(Say(f"{text}; workers start anew from the newest checkpoint as soon as some are there"))
        if self._own is Own.UNEXPLAINED and self._exit is not None:
            exited, self._exit = self._exit, None
            actions += self._on_renewed(exited)
        if self._own is Own.FAILED and self._offered is None:
            actions += self._lose_failed()
        if self._stopping:
            return [*actions, *self._stop_waiting()]
        return actions + self._offer_if_due()

    def _lose_failed(self) -> list[Action]:
        """The own worker failed in a start in which another was lost, which is why."""
        self._own = Own.LOST
        self._spared += 1
        return self._replace_later()

    def _offer_if_due(self) -> list[Action]:
        """Offer this slot, once, where it could start a worker now."""
        ready = self._join_due and self._synced and self._own in (Own.WAITING, Own.LOST)
        ready = ready and not (self._over or self._stopping or self._draining or self._leaves_alone is not None)
        if not ready or self._epoch is None or not self._epoch.waits or self._assembly.offered:
            return []
        self._assembly.offered = True
        return [OfferSlot(self._epoch.number)]

    def _start_if_complete(self) -> list[Action]:
        if self._epoch is None or not self._epoch.waits or self._over:
            return []
        roster = self._assembly.roster(self._epoch)
        return [] if roster is None else [StartAnew(self._epoch, roster)]

    def _on_roster(self, epoch: EpochRecord) -> list[Action]:
        """Start a worker where this slot is one of those that start. Others join when the job trains."""
        self._next_generation = epoch.generation
        seat = seat_of(epoch, self._slot.rank)
        if seat is None or not self._join_due or self._own not in (Own.WAITING, Own.LOST) or self._over:
            return self._check_roster()
        self._attempt += int(self._own is Own.LOST)
        self._generation = epoch.generation
        self._join_due, self._joining, self._was_member, self._own = False, False, False, Own.RUNNING
        return [StartWorker(self.worker, self._generation, seat=seat), *self._check_roster()]

    def _check_roster(self) -> list[Action]:
        """While workers start anew: find out whether agents that are not there are gone for good."""
        if self._epoch is None or self._epoch.roster is None or self._over:
            return []
        gone = self._assembly.gone(self._epoch.roster)
        return [CheckSlots(gone)] if gone else []

    def _on_roster_checked(self, event: SlotsChecked) -> list[Action]:
        if self._epoch is None or self._epoch.roster is None:
            return []
        gone = sorted(set(event.absent) & set(self._epoch.roster.slots))
        if not gone:
            return []
        return [AssembleAgain(self._epoch, f"lost {numbered('slot', gone)} while workers started anew")]

    def _on_time_over(self, reason: str) -> list[Action]:
        """What was waited for has not come, or who comes at once is there."""
        self._assembly.note_time(reason)
        if self._epoch is None or not self._epoch.waits or self._over or self._offered is not None:
            return []
        if reason != f"{MACHINES}{self._epoch.number}":
            return self._start_if_complete()
        text = (
            f"nobody was left who could train ({self._epoch.reason}), and no machine came within "
            f"{self._epoch.waits_seconds:g} s (topology.wait_for_machines_seconds); start the same command again, it "
            "continues from the last checkpoint in bamboo.checkpoint.dir"
        )
        return self._offer(JobFailure(worker=self.worker, kind="no_machines", message=text, traceback=""))

    def _stop_waiting(self) -> list[Action]:
        """The job was asked to end, and there is no iteration after which its workers would."""
        if self._over or self._offered is not None:
            return []
        text = "it was stopped while it waited for machines; its last checkpoint is in bamboo.checkpoint.dir"
        return self._offer(JobFailure(worker=self.worker, kind="stopped", message=text, traceback=""))
