"""Workers come and go at an iteration boundary: a planned change of placement (architecture 6).

One worker decides, and sends its wish with the agreement of an iteration. So all know it at the same boundary, and
carry it out there as one activity:

1. those who join become members (an epoch in which nobody owns anything new);
2. state goes from its owners to who will own or shadow it, and everybody agrees that it has arrived;
3. the new placement becomes the next epoch, and roles change. That needs no more messages: each worker
   takes it from the coordinator, and workers that leave may be gone by then.

Until 3 nothing is given up, so a loss meanwhile leaves things as they were: the wish is dropped, and the next
iteration brings another. After 3 a loss is a loss in the new placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed.utils import logger

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.coordination.records import START
from deepspeed_bamboo.core.contributions import merged
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.peers import peers_of, staying_first, tensor_peers, tree_neighbours
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.placing.sites import WorkerSite, in_agreed_zones
from deepspeed_bamboo.core.reconfiguring import Target, next_target, transfers
from deepspeed_bamboo.core.roles import proposer
from deepspeed_bamboo.errors import DrainedError, ExpelledError, JobStoppedError
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell, tell_once
from deepspeed_bamboo.runtime.job.sites import Contradictions, site_of
from deepspeed_bamboo.runtime.membership.balancing import Balancing
from deepspeed_bamboo.runtime.membership.steering import Found, Steering
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry

_FINAL = "final"


@dataclass(frozen=True)
class Wish:
    """``target`` is to be reached from epoch ``epoch``; ``stop`` is why the job is to end instead."""

    epoch: int
    target: Target | None = None
    stop: str | None = None

    def to_plain(self) -> tuple[Any, ...]:
        """As values that can be sent."""
        return self.epoch, self.target, self.stop


class Reconfiguration:
    """Both sides of it in one worker: having wishes, and carrying out those of all.

    Args:
        worker: whose placement changes.
        transfer: moves the state.
        balancing: what is measured, by which work is shared.
        steering: says when a change is carried out.
        modes: this object hears that an iteration is no measure.
        world: makes the process group of the new epoch.
        known: returns what those who join have to know besides.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        transfer: StateTransfer,
        balancing: Balancing,
        steering: Steering,
        modes: ModeChoice,
        world: WorldEntry,
        known: Callable[[], dict[str, Any]],
    ) -> None:
        self._worker = worker
        self._transfer = transfer
        self._modes = modes
        self._world = world
        self._known = known
        self._wish: Wish | None = None
        self._arranged = False
        # Workers that were taken in once. One of them that is no member any more was lost, and never comes back.
        self._taken_in: set[WorkerId] = set()
        self._noticed_at: float | None = None
        self._said_why_not = False
        self._contradictions = Contradictions(worker)
        self._staying: tuple[WorkerId, ...] = ()  # though their nodes are to be left
        self.stop_agreed = False
        self.balancing = balancing
        self._steering = steering
        self._moved_seconds = 0.0
        self._received = 0

    # -- wishes ------------------------------------------------------------------------------------

    def wish(self) -> Wish | None:
        """What this worker contributes to an iteration's agreement; only the epoch's first member requests changes."""
        worker, session = self._worker, self._worker.session
        self._log_notice()
        record = worker.record
        self._taken_in.update(record.members)
        present, draining = session.present, session.draining
        waiting = [m for name, m in sorted(present.items()) if m.joining and name not in self._taken_in]
        self._steering.look(present, waiting=[member.worker for member in waiting])
        if record.members[0] != worker.me:
            return None
        if session.stop_reason is not None:
            return Wish(record.number, stop=session.stop_reason)
        members = [site_of(present[member]) for member in record.members if member in present]
        if len(members) < len(record.members):
            return None  # somebody is about to be found lost
        self._contradictions.tell((*members, *map(site_of, waiting)))
        if worker.confined:
            self._say_why_not(waiting, draining)
            return None
        joining = [site_of(member) for member in waiting] if worker.protects else []
        target = self._target(record, members, joining, draining)
        if target is None:
            self._say_who_stays(members, draining)
        return None if target is None else Wish(record.number, target=target)

    def _target(
        self,
        record: EpochRecord,
        members: Sequence[WorkerSite],
        joining: Sequence[WorkerSite],
        draining: Mapping[str, Any],
    ) -> Target | None:
        """What is changed at the next boundary: what has to be or would be better, once the policy wants it."""
        worker, balancing = self._worker, self.balancing
        # The launcher's ranks know nothing of zones; once, at the start of a job, that is put right.
        first, self._arranged = not self._arranged and record.reason == START, True
        look = balancing.is_due(record) and worker.protects
        key = (record.number, tuple(joining), tuple(sorted(draining)), tuple(sorted(balancing.slow_workers)))
        target = None if first or look else self._steering.put_off(key)
        if target is None:
            target = next_target(
                worker.placement,
                members=members,
                joining=joining,
                draining=draining,
                protected=worker.protects,
                rearrange=first and worker.protects,
                profile=balancing.profile,
                micro_batches=worker.micro_batches,
                look=look,
                memory=balancing.memory,
            )
        if target is None:
            return None
        return self._steering.chosen(Found(key, target), sites=in_agreed_zones((*members, *joining)))

    def contribution(self) -> dict[str, Any]:
        """What this worker adds to the agreement of an iteration: its measurements, and what it wishes."""
        wish = self.wish()
        return merged(self.balancing.contribution(), {} if wish is None else {"wish": wish.to_plain()})

    def _say_why_not(self, waiting: Sequence[Member], draining: Container[str]) -> None:
        """Whoever got a coordinate of another pipeline would find no data for it, so everybody stays where he is."""
        worker = self._worker
        leaving = [name for name, member in worker.session.present.items() if member.node in draining]
        told = [
            *([f"workers {', '.join(member.worker for member in waiting)} are not taken in"] if waiting else []),
            *([f"what {', '.join(sorted(leaving))} hold is not moved elsewhere"] if leaving else []),
        ]
        if told and not self._said_why_not:
            self._said_why_not = True
            logger.warning(
                f"{' and '.join(told)}: with {worker.grid.pipelines} pipelines others may get a coordinate of any, "
                "and an iterator has the data of one only. Call engine.set_data_source(lambda pipeline, step: "
                "iterator) on every rank before training, or pass training_data to initialize"
            )

    def _say_who_stays(self, members: Sequence[WorkerSite], draining: Container[str]) -> None:
        leaving = tuple(site.worker for site in members if site.node in draining)
        if leaving == self._staying:
            return
        self._staying = leaving
        if leaving and len(leaving) == len(members):
            tell(
                self._worker, "all nodes are to be left, and there is no other to move to: training goes on until then"
            )
        elif leaving and self.balancing.memory is not None:
            tell(self._worker, f"nobody else's device has room for what {', '.join(leaving)} hold: it is not moved")

    def _log_notice(self) -> None:
        """Write the event of a notice that this worker's node has been given, once."""
        session = self._worker.session
        drain = session.draining.get(session.identity.node)
        if drain is not None and drain.time_seconds != self._noticed_at:
            self._noticed_at = drain.time_seconds
            self._worker.log_event(
                "notice", node=drain.node, deadline_seconds=drain.deadline_seconds, reason=drain.reason
            )

    def note(self) -> None:
        """Remember what was wished in the iteration that just ended, the same on every worker."""
        self._modes.note(value for _, value in sorted(self._worker.activity.previous[0].items()))
        self.balancing.note(self._worker.activity.previous[0])
        self._steering.note(self._worker.activity.previous[0])
        wishes = [value.get("wish") for _, value in sorted(self._worker.activity.previous[0].items())]
        self._wish = next((Wish(*wish) for wish in wishes if wish is not None), None)
        self.stop_agreed = self._wish is not None and self._wish.stop is not None

    # -- carrying them out -------------------------------------------------------------------------

    def run_if_wished(self, *, before_moves: Callable[[], None]) -> None:
        """At an iteration boundary, on every worker.

        ``before_moves`` is called before stages move: a shadow that becomes the owner lacks what the script changed.
        Raises DrainedError on a worker that leaves, once nobody needs it, and JobStoppedError everywhere when
        the job is to end.
        """
        wish, self._wish = self._wish, None
        if wish is None:
            return
        if wish.stop is not None:
            raise JobStoppedError(
                f"the job was asked to stop: {wish.stop}. The script asked for another iteration, so what comes after "
                "its loop (saving a checkpoint, say) is not done; a loop `while not engine.finished` is left instead"
            )
        if wish.target is not None:
            before_moves()
            self.carry_out(wish.epoch, wish.target)

    def carry_out(self, epoch: int, target: Target) -> None:
        """Bring the job from ``epoch`` to ``target``, or leave it as it is when somebody is lost meanwhile."""
        worker, before = self._worker, self._worker.placement
        started = time.perf_counter()
        self._modes.disturb()
        try:
            worker.perform("reconfigure", lambda: self._body(epoch, target))
        except ExpelledError as error:
            self._raise_if_drained(target, error)
            raise
        finally:
            worker.session.interruption.expect(None)
        record = worker.activity.previous[-1]
        final = next((value[_FINAL] for value in record.values() if value.get(_FINAL) is not None), None)
        if final is not None:
            seconds = time.perf_counter() - started
            self._steering.moved(before, target, seconds=seconds)
            self._tell(target, seconds=seconds)
        if final is not None and worker.me in target.leaving:
            raise DrainedError(_drained(final))

    def _raise_if_drained(self, target: Target, error: ExpelledError) -> None:
        """Of what comes last a worker that leaves may hear nothing but the epoch without it, and all is done then."""
        final = self._worker.session.interruption.record
        if final is None or self._worker.me not in target.leaving or final.lost:
            return
        if (final.members, final.placement) == (target.members, target.placement):
            raise DrainedError(_drained(final)) from error

    def _body(self, epoch: int, target: Target) -> None:
        worker = self._worker
        if worker.activity.rounds and any(_FINAL in value for value in worker.activity.rounds[-1].values()):
            return
        current = worker.record
        if current.number != epoch:
            worker.activity.rounds.append(worker.agree({_FINAL: None}))
            return
        self._reach(current, target)

    def _reach(self, current: EpochRecord, target: Target) -> None:
        worker, session = self._worker, self._worker.session
        session.interruption.expect(target.members, target.placement)
        record = current
        if target.joining and session.worker not in target.joining:
            record = self._take_in(current, target)
        started = time.perf_counter()
        self._move(record, target)
        self._moved_seconds = time.perf_counter() - started
        # Who leaves may be gone as soon as the next epoch is there, and nobody would tell the others of its end.
        worker.activity.rounds.append(worker.agree({"copied": True}, leaving=target.leaving))
        final = self._propose(record, members=target.members, reason=target.reason, target=target)
        if final is None:
            final = session.interruption.wait_for_expected(after=record.number)
        worker.activity.rounds.append({session.worker: {_FINAL: final}})
        self._adopt(final, target)

    def _take_in(self, current: EpochRecord, target: Target) -> EpochRecord:
        """Make the joining workers members. The coordinator tells them, with what they need to know."""
        worker, session = self._worker, self._worker.session
        proposed = None
        if current.members[0] == session.worker:
            welcome = {
                "target": target.to_json(),
                "activity": worker.activity.index,
                "placement": worker.placement.to_json(),
                "known": self._known(),
            }
            members, reason = (*current.members, *target.joining), f"to join: {', '.join(target.joining)}"
            proposed = self._propose(current, members=members, reason=reason, welcome=welcome)
        agreed = worker.agree({"joined": proposed})
        worker.activity.rounds.append(agreed)
        record: EpochRecord = next(value["joined"] for value in agreed.values() if value["joined"] is not None)
        self._taken_in.update(target.joining)
        worker.view.adopt(record, worker.placement)
        worker.links.extend(
            members=session.with_retries(session.coordinator.members),
            order=record.members,
            name=f"{session.identity.job}/{record.number}",
        )
        return record

    def _propose(
        self,
        base: EpochRecord,
        *,
        members: tuple[WorkerId, ...],
        reason: str,
        target: Target | None = None,
        welcome: dict[str, Any] | None = None,
    ) -> EpochRecord | None:
        """As the first member: make the next epoch, for which ``welcome`` is published first.

        Raises what interrupts when somebody else made one first; after one that has only new shadows, tries again.
        """
        worker, session = self._worker, self._worker.session
        if proposer(base.members) != session.worker:
            return None
        while True:
            number = self._newest_number(base)
            if welcome is not None:
                session.with_retries(partial(session.coordinator.publish_long, number + 1, WELCOME, welcome))
            record = replace(
                base,
                number=number + 1,
                members=members,
                placement=worker.placement if target is None else target.placement,
                reason=reason,
                lost=(),
                proposer=session.worker,
                time_seconds=time.time(),
                restoring=-1,
                roster=None,
            )
            if session.with_retries(partial(session.coordinator.propose, record, expected=number)):
                return record

    def _newest_number(self, base: EpochRecord) -> int:
        """Of the epoch that is ``base`` but for new shadows. Raises what interrupts when there is another one."""
        newest = self._worker.session.with_retries(self._worker.session.coordinator.epoch)
        if newest is None:
            raise RuntimeError("the job has no epoch any more")
        self._worker.session.interruption.announce_epoch(newest)
        self._worker.session.interruption.check()
        return newest.number

    def _move(self, record: EpochRecord, target: Target) -> None:
        """Send and receive the state that has to move, over channels that are made first."""
        worker, me = self._worker, self._worker.me
        moves = transfers(worker.placement, target.placement)
        self._received = sum(move.destination == me for move in moves)
        partners = {m.source for m in moves if m.destination == me} | {m.destination for m in moves if m.source == me}
        worker.links.connect(self._peers(record, target, partners), with_lanes=partners)
        worker.host.save()
        label = f"{worker.activity.index}/reconfigure"
        for move in moves:
            if move.source == me:
                self._transfer.send_description(move.coordinate, to=move.destination, label=label)
        for move in moves:
            if move.destination == me:
                replica = self._transfer.take_described(move.coordinate, source=move.source, label=label)
                worker.host.shadows[move.coordinate] = replica
        for move in moves:
            if move.source == me:
                self._transfer.send_replica(move.coordinate, to=move.destination, label=label)
        for move in moves:
            if move.destination == me:
                self._transfer.receive_replica(move.coordinate, source=move.source, label=label)

    def _peers(self, record: EpochRecord, target: Target, partners: Iterable[WorkerId]) -> list[WorkerId]:
        """Those that state comes from or goes to, and those through which the agreements with who joins go."""
        above, below = tree_neighbours(staying_first(record.members, leaving=target.leaving), self._worker.me)
        through = below if above is None else (above, *below)
        return sorted({*partners, *through} - {self._worker.me})

    def _adopt(self, record: EpochRecord, target: Target) -> None:
        """Everybody has agreed: roles change, and the channels of the new placement are made."""
        worker, session = self._worker, self._worker.session
        worker.host.take_roles(
            owned=record.placement.hosted_by(session.worker), shadows=record.placement.shadowed_by(session.worker)
        )
        self._transfer.leave_to_script()
        worker.view.adopt(record, record.placement)
        worker.host.activate_shown()
        session.interruption.expect(None)
        if session.worker in target.leaving:
            return
        worker.links.extend(
            members=session.with_retries(session.coordinator.members),
            order=record.members,
            name=f"{session.identity.job}/{record.number}",
        )
        worker.links.connect(
            peers_of(record.placement, session.worker, members=record.members),
            with_lanes=tensor_peers(record.placement, session.worker),
        )
        self._world.enter(record)

    def _tell(self, target: Target, *, seconds: float) -> None:
        worker = self._worker
        hosted = [str(c) for c in target.placement.hosted_by(worker.me)]
        tell_once(worker, f"step {worker.step}: {target.reason}; {len(target.members)} workers, pause {seconds:.2f} s")
        if worker.me in target.joining and not hosted:
            tell(worker, "stands by: every stage has a worker; it takes over for one that is lost or leaves")
        fields: dict[str, Any] = {
            "reason": target.reason,
            "joining": list(target.joining),
            "leaving": list(target.leaving),
            "seconds": seconds,
            "transfer_seconds": self._moved_seconds,
            "received": self._received,
            "hosted": hosted,
        }
        worker.log_event("joined" if worker.me in target.joining else "reconfigured", **fields)


def _drained(final: EpochRecord) -> str:
    return f"this worker was drained ({final.reason}); everything it held is elsewhere"


WELCOME = "welcome"
"""Under which name what those who join have to know is published."""


def expected_coordinate(record: EpochRecord, members: Iterable[Member], me: Member) -> Coordinate:
    """Whose rank a worker that joins has until then: one that it will most likely be given; any when it will stand by.

    Never that of rank 0 where there is another one: scripts write files and print by it, and somebody stands for it.
    """
    sites = [site_of(member) for member in members if member.worker in record.members]
    target = next_target(record.placement, members=sites, joining=[site_of(me)])
    hosted = () if target is None else target.placement.hosted_by(me.worker)
    first, *others = record.placement.grid
    # As rank 0 the last stage of a pipeline has data.
    candidates = (*hosted, *(c for c in others if c.stage in (0, record.placement.grid.stages - 1)))
    return next((coordinate for coordinate in candidates if coordinate != first), first)
