"""Carries out an agent's decisions that need the coordinator, without making the agent wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from deepspeed_bamboo.coordination import (
    AgentRecord,
    CoordinatorUnavailable,
    EpochRecord,
    JobCoordinator,
    JobFailure,
    LeaseExpired,
    Member,
    Registration,
)
from deepspeed_bamboo.coordination.machine_identity import own_machine
from deepspeed_bamboo.coordination.process_state import process_state
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic import decisions
from deepspeed_bamboo.elastic.assembly import Offer
from deepspeed_bamboo.elastic.courier import Courier, Errand
from deepspeed_bamboo.elastic.gathering import GONE
from deepspeed_bamboo.elastic.losses import Presence, probe, settle_loss
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.slot import Slot, generation_of, rank_of

logger = logging.getLogger(__name__)

_AS_LONG_AS_IT_TAKES = float("inf")
_FAILURE_SECONDS = 2.0
_ENDED_SECONDS = 30.0
_SETTLING_SECONDS = 1.0
_JUDGING_SECONDS = 0.05
_JUDGE_ELSEWHERE_SECONDS = 1.0  # its key stays for the time of its lease, even if it was killed with its worker


def forget_past_drain(coordinator: JobCoordinator, node: str) -> None:
    """Withdraw a request to leave ``node`` that is none for whoever comes there now.

    The machine was gone before the job had left it, and its deadline is over. Names of machines stay in many places.
    """
    drain = coordinator.draining().get(node)
    if drain is None or drain.deadline_seconds is None:
        return
    if time.time() - drain.time_seconds > drain.deadline_seconds and not _takes_part(coordinator, node):
        coordinator.cancel_drain(node)


def _takes_part(coordinator: JobCoordinator, node: str) -> bool:
    """Whether the job has a worker on ``node``. The key of one that was lost may still be there."""
    epoch = coordinator.peek_epoch()
    there = [member.worker for member in coordinator.members().values() if member.node == node]
    return any(epoch is None or worker in epoch.members for worker in there)


class Messenger:
    """Two couriers: one for who is lost, which may have to wait for the end of an outage, one for how it ends."""

    def __init__(
        self,
        coordinator: JobCoordinator,
        slot: Slot,
        registration: Registration,
        mailbox: Mailbox,
        *,
        lease_seconds: float,
        say: Callable[[str], None] = logger.info,
        make_offer: Callable[[], Offer] | None = None,
    ) -> None:
        """``registration`` is the agent's own: it tells whether the coordinator was out of reach lately.

        ``make_offer`` describes this slot to those with whom its worker may start anew.

        ``say`` is called, from another thread, with a loss that can't be reported to the coordinator yet.
        """
        self._coordinator = coordinator
        self._slot = slot
        self._registration = registration
        self._mailbox = mailbox
        self._lease_seconds = lease_seconds
        self._say = say
        self._make_offer = make_offer
        self._waiting: WorkerId | None = None  # the lost worker of which it was said that its loss waits
        self._unjudged: dict[WorkerId, float] = {}  # gone worker -> since when its own agent is to judge
        self._proposer = f"agent of rank {slot.rank}"
        self._losses = Courier()
        self._endings = Courier()

    def send(self, action: decisions.Action) -> None:
        """Carry out ``action``; returns at once. Its result arrives in the mailbox."""
        if isinstance(action, decisions.ReportLoss):
            self._losses.send(Errand(f"loss of {action.worker}", lambda: self._report(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.CheckVanished):
            self._losses.send(Errand(f"check of {action.worker}", lambda: self._check(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.CheckSlots):
            self._losses.send(Errand("check of slots", lambda: self._check_slots(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.OfferSlot):
            self._losses.send(Errand("offer", lambda: self._publish_offer(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.StartAnew | decisions.AssembleAgain):
            self._losses.send(Errand("start anew", lambda: self._anew(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.CheckSuspect):
            self._losses.send(Errand(f"probe of {action.worker}", lambda: self._probe(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.MarkEnded):
            name, give_up = f"end of {action.worker}", None if action.drained else self._unrecorded
            self._endings.send(Errand(name, lambda: self._mark_ended(action), _ENDED_SECONDS, give_up))
        elif isinstance(action, decisions.Withdraw):
            worker = action.worker
            self._endings.send(Errand(f"key of {worker}", lambda: self._coordinator.withdraw(worker), _ENDED_SECONDS))
        elif isinstance(action, decisions.RequestDrain):
            self._losses.send(Errand(f"drain of {action.node}", lambda: self._drain(action), _AS_LONG_AS_IT_TAKES))
        elif isinstance(action, decisions.ForgetDrain):
            node = action.node
            self._endings.send(Errand(f"end of the drain of {node}", lambda: self._forget_drain(node), _ENDED_SECONDS))
        elif isinstance(action, decisions.PublishHang):
            hang = action
            self._endings.send(
                Errand("hang", lambda: self._coordinator.publish_hang(hang.worker, hang.facts), _FAILURE_SECONDS)
            )
        elif isinstance(action, decisions.Finish):
            summary = {"reason": action.reason}
            finish = Errand("finish", lambda: self._coordinator.finish(summary), _ENDED_SECONDS, self._unrecorded)
            self._endings.send(finish)
        elif isinstance(action, decisions.Fail):
            failure = action.failure
            self._endings.send(
                Errand("failure", lambda: self._fail(failure), _FAILURE_SECONDS, lambda: self._recorded(failure))
            )

    def compact(self) -> None:
        """Make etcd forget replaced values, if this user may do so; returns at once."""
        self._endings.send(Errand("compaction", self._compact, within_seconds=_FAILURE_SECONDS))

    def _compact(self) -> None:
        try:
            self._coordinator.compact_history()
        except CoordinatorUnavailable as error:
            self._say(f"etcd's history is not compacted (coordinator.compact): {error.reason}")

    def stop(self, *, within_seconds: float) -> None:
        """Deliver what is queued, as far as that is possible in time."""
        deadline = time.monotonic() + within_seconds
        for courier in (self._losses, self._endings):
            courier.stop(within_seconds=max(0.0, deadline - time.monotonic()))

    @staticmethod
    def clean_up_if_last(coordinator: JobCoordinator) -> None:
        """Remove the job's keys when no other agent is left to need them."""
        try:
            coordinator.clean_up_if_last()
        except (CoordinatorUnavailable, LeaseExpired) as error:
            logger.info("keys of job %s left behind: %s", coordinator.job, error)

    def _report(self, action: decisions.ReportLoss) -> None:
        try:
            settled = settle_loss(
                self._coordinator,
                action.worker,
                reason=action.reason,
                generation=action.generation,
                proposer=self._proposer,
            )
        except CoordinatorUnavailable:
            if self._waiting != action.worker:
                self._waiting = action.worker
                self._say(f"lost {action.worker} ({action.reason}); etcd does not answer, and survivors wait for it")
            raise
        if isinstance(settled, int):
            self._mailbox.put(decisions.LossSettled((action.worker,), None, action.reason, generation=settled))
        else:
            self._settled(action.worker, settled)
        self.send(decisions.Withdraw(action.worker))

    def _check(self, action: decisions.CheckVanished) -> None:
        """A key that is gone means a loss, unless keys went because the store was out of reach or lost its data.

        Then everybody gets the time of a lease to come back.
        """
        grace = self._grace_seconds(self._coordinator.agents())
        if grace > 0:
            logger.info("the coordinator was out of reach; %s gets %.1f s to return", action.worker, grace)
            self._mailbox.put_later(decisions.Woken("absent"), after_seconds=max(0.1, grace))
            return
        if action.worker in self._coordinator.members():
            return
        self._propose(action.worker, f"no sign of life for {self._lease_seconds:g} s")

    def _check_slots(self, action: decisions.CheckSlots) -> None:
        """As :meth:`_check`, for agents before the first epoch."""
        job, agents = self._coordinator, self._coordinator.agents()
        grace = self._grace_seconds(agents)
        if grace > 0:
            self._mailbox.put_later(decisions.Woken(GONE), after_seconds=max(0.1, grace))
            return
        epoch = job.epoch()
        begun = (epoch is not None and epoch.trains) or job.failure() is not None or job.finished() is not None
        absent = () if begun else tuple(rank for rank in action.ranks if rank not in agents)
        self._mailbox.put(decisions.SlotsChecked(absent))

    def _publish_offer(self, action: decisions.OfferSlot) -> None:
        if self._make_offer is not None:
            self._coordinator.publish_progress(action.epoch, f"slot-{self._slot.rank}", asdict(self._make_offer()))

    def _anew(self, action: decisions.StartAnew | decisions.AssembleAgain) -> None:
        if isinstance(action, decisions.StartAnew):
            self._coordinator.start_anew(action.epoch, action.roster, proposer=self._proposer)
        else:
            self._coordinator.wait_for_machines(action.epoch, reason=action.reason, proposer=self._proposer)

    def _grace_seconds(self, agents: Mapping[int, AgentRecord]) -> float:
        """How long the others still have to come back after an outage; ``agents`` are those known a moment ago.

        An own key that is there again means that the interruption is on record.
        """
        settled = self._registration.settled_for_seconds() if self._slot.rank in agents else 0.0
        return self._lease_seconds + _SETTLING_SECONDS - settled

    def _probe(self, action: decisions.CheckSuspect) -> None:
        member = self._coordinator.members().get(action.worker)
        if member is None or probe(member) is not Presence.GONE:
            return
        since = self._unjudged.setdefault(action.worker, time.monotonic())
        if self._has_a_judge(member, waited_seconds=time.monotonic() - since):
            suspected = decisions.Suspected(action.worker, action.reason)
            self._mailbox.put_later(suspected, after_seconds=_JUDGING_SECONDS)
            return
        if not self._is_judged(action.worker):
            self._propose(action.worker, f"{action.reason}; its process is gone, its machine answers")

    def _is_judged(self, worker: WorkerId) -> bool:
        """Whether an agent has said how ``worker`` or the job ended. Ask after its agent is gone: that speaks first."""
        job = self._coordinator
        return job.failure() is not None or job.finished() is not None or worker in job.ended()

    def _has_a_judge(self, member: Member, *, waited_seconds: float) -> bool:
        """Whether there is an agent beside the process of ``member``, which knows better how that ended."""
        agent = self._coordinator.agents().get(rank_of(member.worker))
        if agent is None:
            return False
        if agent.machine and agent.machine == own_machine():
            return process_state(agent.pid) not in ("", "Z", "X")
        return waited_seconds < _JUDGE_ELSEWHERE_SECONDS

    def _propose(self, worker: WorkerId, reason: str) -> None:
        before = self._coordinator.epoch()
        if before is None or worker not in before.members:
            return
        epoch = self._coordinator.propose_loss([worker], reason=f"{worker}: {reason}", proposer=self._proposer)
        self.send(decisions.Withdraw(worker))
        if epoch.proposer == self._proposer and worker in epoch.lost:
            self._settled(worker, epoch)

    def _settled(self, worker: WorkerId, epoch: EpochRecord | None) -> None:
        self._mailbox.put(decisions.LossSettled((worker,), epoch))

    def _mark_ended(self, action: decisions.MarkEnded) -> None:
        how = {"drained": True} if action.drained else {}
        self._coordinator.mark_ended(action.worker, {"generation": action.generation, **how})
        self._coordinator.withdraw(action.worker)

    def _drain(self, action: decisions.RequestDrain) -> None:
        self._coordinator.request_drain(action.node, deadline_seconds=action.deadline_seconds, reason=action.reason)

    def _forget_drain(self, node: str) -> None:
        """Of several agents of the node the last one finds nobody there."""
        if not _takes_part(self._coordinator, node):
            self._coordinator.cancel_drain(node)

    def _fail(self, failure: JobFailure) -> None:
        if failure.kind == "user_error" and self._is_starting_again(failure.worker):
            self._mailbox.put(decisions.FailureRecorded(failure, first=False))
        else:
            self._mailbox.put(decisions.FailureRecorded(failure, first=self._coordinator.fail(failure)))

    def _is_starting_again(self, worker: WorkerId) -> bool:
        """Whether ``worker`` failed only because another was lost before there was an epoch, or in a start anew."""
        epoch = self._coordinator.epoch()
        started = max(self._coordinator.generation(), 0 if epoch is None else epoch.generation)
        return (epoch is not None and epoch.waits) or generation_of(worker) != started

    def _unrecorded(self) -> None:
        """Nobody will hear that the job is complete, so nobody may wait for it."""
        reason = f"the scripts have ended, but for {_ENDED_SECONDS:g} s that could not be recorded in etcd"
        self._mailbox.put(decisions.CoordinatorGone(reason))

    def _recorded(self, failure: JobFailure) -> None:
        self._mailbox.put(decisions.FailureRecorded(failure, first=True))
