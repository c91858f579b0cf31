"""One job's shared state: its members, its epoch, their progress, and its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, JobNameTaken, NoEpoch
from deepspeed_bamboo.coordination.job_news import JobNews
from deepspeed_bamboo.coordination.keys import jobs_root
from deepspeed_bamboo.coordination.losing import fatal_loss, starting_anew, waiting, without_lost
from deepspeed_bamboo.coordination.records import AgentRecord, Change, EpochRecord, Member, Roster
from deepspeed_bamboo.coordination.registration import Registration
from deepspeed_bamboo.coordination.run import new_run
from deepspeed_bamboo.coordination.shared_registration import SharedRegistration, conditions_for
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.coordination.values import GENERATION, encode, member_of, member_text
from deepspeed_bamboo.coordination.watching import JobWatch
from deepspeed_bamboo.core.placement import WorkerId

logger = logging.getLogger(__name__)

DEFAULT_PREFIX = "/deepspeed_bamboo"
_KEPT_SECONDS = 86_400.0
_CLEANING_SECONDS = 10.0


class JobCoordinator(JobNews):
    """The job ``job`` under ``prefix`` in ``store``. Safe to use from any number of threads.

    Every call is bounded in time by the store's own limit and raises CoordinatorUnavailable when
    the store gave no answer; nothing has been concluded then, and the call may be repeated.
    """

    def __init__(
        self, store: KeyValueStore, *, job: str, prefix: str = DEFAULT_PREFIX, generation: int | None = None
    ) -> None:
        """Raises EndpointError when ``job`` cannot be part of a key.

        ``generation`` is that of the worker that uses this coordinator (see :meth:`advance_generation`):
        it sees members of its own generation only. None, for an agent: all of them.
        """
        super().__init__(store, job=job, prefix=prefix)
        self._own_generation = generation
        self._lock = threading.Lock()
        self._latest: EpochRecord | None = None

    @property
    def own_generation(self) -> int:
        """Of the worker that uses this."""
        return self._own_generation or 0

    # -- who is there ------------------------------------------------------------------------------

    def register(
        self, member: Member, *, lease_seconds: float, in_charge: Callable[[], bool] = lambda: True
    ) -> SharedRegistration:
        """Make ``member`` known for as long as its lease is kept: by its agent, or by this process while ``in_charge``.

        Its key goes with the lease, which every watcher sees. After an outage of the store it is
        written again if the member is still part of the current epoch, or if there is none yet, or if it
        was in none so far: one that joins waits for as long as it takes.
        """
        registration = self._shared(
            member.worker, joining=member.joining, lease_seconds=lease_seconds, in_charge=in_charge
        )
        self._run.check()
        registration.enter(member_text(member, generation=self._own_generation or 0))
        registration.start()
        return registration

    def keep(
        self, worker: WorkerId, *, joining: bool, lease_seconds: float, in_charge: Callable[[], bool]
    ) -> SharedRegistration:
        """Keep what ``worker`` registers, for it and while ``in_charge``; for its agent. Returns at once."""
        registration = self._shared(worker, joining=joining, lease_seconds=lease_seconds, in_charge=in_charge)
        registration.start()
        return registration

    def _shared(
        self, worker: WorkerId, *, joining: bool, lease_seconds: float, in_charge: Callable[[], bool]
    ) -> SharedRegistration:
        return SharedRegistration(
            self._store,
            key=self._keys.member(worker),
            lease_seconds=lease_seconds,
            conditions=conditions_for(worker, joining=joining, epoch=self.epoch, in_charge=in_charge),
        )

    def members(self) -> dict[WorkerId, Member]:
        """The registered workers, of the own generation if this coordinator has one."""
        found = self._read.children(self._keys.members, "member")
        return {name: member_of(value) for name, value in found if self._is_of_own_generation(value)}

    def withdraw(self, worker: WorkerId) -> None:
        """Remove the key of ``worker``, whose process is known to be gone."""
        self._store.delete(self._keys.member(worker))

    def register_agent(self, agent: AgentRecord, *, lease_seconds: float) -> Registration:
        """Make a slot's agent known for as long as it lives; it may come back after an outage, into the same run."""
        self._run.check()
        return Registration(
            self._store,
            key=self._keys.agent(agent.rank),
            value=encode(agent.to_json()),
            lease_seconds=lease_seconds,
            may_return=self._run.check,
        )

    def agents(self) -> dict[int, AgentRecord]:
        """The agents that run now, by their slot's rank."""
        found = self._read.children(self._keys.agents, "agent")
        return {int(rank): agent for rank, agent in found if rank.isascii() and rank.isdigit()}

    def mark_ended(self, worker: WorkerId, info: dict[str, Any]) -> None:
        """Record that ``worker`` ended its script without an error, so that its absence is no loss."""
        self._run.check()
        self._store.put(self._keys.ended(worker), encode(info))

    def ended(self) -> dict[WorkerId, dict[str, Any]]:
        """The workers that ended their scripts without an error."""
        return dict(self._read.children(self._keys.all_ended, "ended"))

    # -- epochs ------------------------------------------------------------------------------------

    def epoch(self) -> EpochRecord | None:
        """The current epoch, or None before the first.

        Puts back the newest epoch this process knows of when the store has lost it (an etcd that
        came back without its data): what all had agreed on stays agreed on. Raises AnotherRun when the job has ended
        since, and may have been started anew.
        """
        return self._read_epoch()[0]

    def peek_epoch(self) -> EpochRecord | None:
        """The current epoch as the store has it, for onlookers: nothing is put back."""
        found: EpochRecord | None = self._read.one(self._keys.epoch, "epoch")
        return found

    def propose(self, record: EpochRecord, *, expected: int | None) -> bool:
        """Make ``record`` the current epoch if the current one is still ``expected`` (None: none yet).

        The first proposer wins; False for everybody else, and for a first epoch of workers that are being
        started again. Workers that start anew follow the epoch that says so. Raises ValueError unless
        ``record.number`` follows ``expected``.
        """
        if record.number != (0 if expected is None else expected + 1):
            raise ValueError(f"epoch {record.number} cannot follow epoch {expected}; numbers go up by one from 0")
        current, revision = self._read_epoch()
        if current == record:
            return True  # an attempt of which the caller did not hear has made it
        if (current.number if current else None) != expected:
            return False
        if expected is not None:
            return self._swap(record, revision)
        generation, generation_revision = self._read_generation()
        if generation != (self._own_generation or 0):
            return False
        return self._swap(record, revision, guard=(self._keys.generation, generation_revision))

    def propose_loss(
        self,
        lost: Iterable[WorkerId],
        *,
        reason: str,
        proposer: str,
        judge: WorkerId | None = None,
        unless_fatal: bool = False,
    ) -> EpochRecord:
        """Make the job continue without the workers in ``lost``; returns the current epoch, which has none of them.

        If that loses a coordinate for good, the survivors bring the state back from a checkpoint, where the job makes
        such; where nobody is left who could, agents wait for machines, if that is wanted; else this records a
        ``fatal_loss`` failure naming it and returns the current epoch as it is. Raises NoEpoch before the first epoch.

        ``judge``: the worker whose word this is. One without which the job has continued has none: of two that can't
        reach each other, one stays. ``unless_fatal``: nothing is recorded where nobody else has what they hold.
        """
        gone = frozenset(lost)
        while True:
            current, revision = self._read_epoch()
            if current is None:
                raise NoEpoch(f"{', '.join(sorted(gone))} lost before job {self.job} had its first epoch")
            leaving = tuple(worker for worker in current.members if worker in gone)
            if not leaving or (judge is not None and judge not in current.members):
                return current
            record = without_lost(current, leaving, reason=reason, proposer=proposer)
            if record is None and unless_fatal:
                return current
            if record is None:
                why = f"after the loss of {', '.join(leaving)} in epoch {current.number} ({reason})"
                gone_for_good = current.placement.without(leaving)[1]
                self.fail(fatal_loss(leaving[0], gone_for_good, why, stores=current.stores))
                return current
            if self._swap(record, revision):
                return record

    def wait_for_machines(self, current: EpochRecord, *, reason: str, proposer: str) -> None:
        """Have all agents wait for machines, if ``current`` is still the epoch. Whoever trains or starts is ended."""
        record = waiting(current, current.members, reason=reason, proposer=proposer)
        self.propose(record, expected=current.number)

    def start_anew(self, current: EpochRecord, roster: Roster, *, proposer: str) -> None:
        """Have the workers of ``roster`` start, if ``current``, in which agents wait, is still the epoch."""
        self.propose(starting_anew(current, roster, proposer=proposer), expected=current.number)

    def report_suspicion(self, epoch_number: int, *, reporter: WorkerId, suspect: WorkerId, reason: str) -> None:
        """Tell the agents that ``reporter`` cannot reach ``suspect``. A hint, not a loss: they look themselves."""
        key = self._keys.suspicion(epoch_number, suspect=suspect, reporter=reporter)
        self._store.put(key, encode({"reporter": reporter, "reason": reason}))

    def claim_fault(self, name: str) -> bool:
        """True for the first caller in this job: it alone causes the scripted fault ``name``."""
        return self._store.compare_and_swap(self._keys.fault(name), encode({}), revision=0)

    # -- starting over before there was anything to lose ------------------------------------------

    def generation(self) -> int:
        """How often the workers were started from the beginning before the first epoch; 0 at first."""
        return self._read_generation()[0]

    def advance_generation(self, *, expected: int) -> bool:
        """Ask all agents to start their workers again, which is possible as long as there is no epoch.

        True when the generation after ``expected`` has begun, by this call or another. False when the job
        has an epoch: then there is something to lose, and :meth:`propose_loss` is what to do.
        """
        while True:
            generation, revision = self._read_generation()
            if generation > expected:
                return True
            if self.epoch() is not None:
                return False
            value, absent = encode(expected + 1), (self._keys.epoch, 0)
            if self._store.compare_and_swap(self._keys.generation, value, revision=revision, guard=absent):
                return True

    # -- who comes and who goes --------------------------------------------------------------------

    def record_start(self, *, slots: int, salt: str = "", proof: str = "") -> None:
        """The job begins now, with so many slots. ``salt`` and ``proof`` are public, see ``trust/secret.py``."""
        value = {"time_seconds": time.time(), "slots": slots, "salt": salt, "proof": proof, **new_run()}
        self._store.compare_and_swap(self._keys.started, encode(value), revision=0)
        self.reserve_ranks(slots)

    def started_seconds(self) -> float | None:
        """The wall clock of whoever started the job, at that time, for people to read; None if it isn't known."""
        found = self._read.one(self._keys.started, "started")
        return None if found is None else float(found["time_seconds"])

    def start_slots(self) -> int:
        """The number of slots that the job was started with; 0 if that isn't known."""
        found = self._read.one(self._keys.started, "started")
        return 0 if found is None else int(found.get("slots", 0))

    def salt_and_proof(self) -> tuple[str, str]:
        """What those who have the key make the job's secret of, and can compare it with; empty if that isn't known."""
        value = self._read.one(self._keys.started, "started") or {}
        return str(value.get("salt", "")), str(value.get("proof", ""))

    def reserve_ranks(self, count: int) -> None:
        """Keep ranks 0 to ``count`` - 1 for the slots that start the job; :meth:`next_rank` gives later ones."""
        self._store.compare_and_swap(self._keys.next_rank, encode(count), revision=0)

    def next_rank(self) -> int:
        """A slot rank that is new in this job, for an agent that joins it."""
        while True:
            rank, revision = self._read.with_revision(self._keys.next_rank, "next_rank")
            if rank is None:  # the store lost its data: at least nobody who is there now has the same
                rank = 1 + max([-1, *self.agents(), *(member.rank for member in self._all_members())])
            if self._store.compare_and_swap(self._keys.next_rank, encode(rank + 1), revision=revision):
                return int(rank)

    # -- the end -----------------------------------------------------------------------------------

    def watch(self, on_change: Callable[[Change], None]) -> JobWatch:
        """Call ``on_change`` from one thread for all there is, then for every change; see JobWatch."""

        def remember(change: Change) -> None:
            if change.kind == "epoch" and change.value is not None:
                self._remember(change.value)
            on_change(change)

        return JobWatch(self._store, self._keys, remember)

    @contextmanager
    def claim_name(self, *, lease_seconds: float) -> Iterator[None]:
        """Start the job from nothing: remove what a dead job of this name left. Nobody else can meanwhile.

        Leave the ``with`` block once an agent is registered, within ``lease_seconds``. Raises
        JobNameTaken when a job of this name is alive, which is when it has a live agent or worker, or
        is just being started.
        """
        remedy = "start this command again in a moment to join it, or give this job another name with --job NAME"
        lease = self._store.grant_lease(lease_seconds)
        try:
            if not self._store.compare_and_swap(self._keys.claim, self.job, revision=0, lease=lease):
                raise JobNameTaken(f"a job named {self.job!r} is being started at this moment; {remedy}")
            live = [f"slot {rank} on {agent.node}" for rank, agent in self.agents().items()]
            live += [f"worker {worker}" for worker in self.members()]
            if live:
                raise JobNameTaken(f"a job named {self.job!r} is running ({', '.join(live)}); {remedy}")
            self._forget_run()
            self._delete_everything()
            self._store.delete(self._keys.last_end)
            yield
        finally:
            self._store.revoke(lease)

    def is_being_started(self) -> bool:
        """Whether somebody is within :meth:`claim_name` now, or removes the keys of the job that was."""
        return self._store.get(self._keys.claim) is not None

    def clean_up_if_last(self) -> None:
        """As :meth:`clean_up` if no agent is there. Whoever starts the job at this moment does so itself, or waits."""
        if self.agents():
            return
        lease = self._store.grant_lease(_CLEANING_SECONDS)
        try:
            # Else the keys of the next job of this name, which may have begun since, would go with this one's.
            if self._store.compare_and_swap(self._keys.claim, self.job, revision=0, lease=lease) and not self.agents():
                self.clean_up()
        finally:
            self._store.revoke(lease)

    def clean_up(self) -> None:
        """Remove the job's keys, except for how it ended, which is kept for a day. Two may do so in turn."""
        end = self.end()
        self._forget_run()
        self._delete_everything()
        if end is not None:
            lease = self._store.grant_lease(_KEPT_SECONDS)
            self._store.put(self._keys.last_end, encode(end.to_json()), lease=lease)

    def close(self) -> None:
        """End the watches and the connection of the store underneath."""
        self._store.close()

    # -- inside ------------------------------------------------------------------------------------

    def _forget_run(self) -> None:
        self._run.forget()
        with self._lock:
            self._latest = None

    def _delete_everything(self) -> None:
        self._store.delete_prefix(self._keys.root)
        self._store.delete_prefix(self._keys.all_reports)
        self._store.delete_prefix(self._keys.all_long)
        self._store.delete_prefix(self._keys.all_whereabouts)
        self._store.delete_prefix(self._keys.all_works)
        self._store.delete_prefix(self._keys.all_past)
        self._store.delete(self._keys.status)
        self._store.delete(self._keys.events)

    def _all_members(self) -> list[Member]:
        return [member_of(value) for _, value in self._read.children(self._keys.members, "member")]

    def _is_of_own_generation(self, value: dict[str, Any]) -> bool:
        return self._own_generation is None or value.get(GENERATION, 0) == self._own_generation

    def _read_generation(self) -> tuple[int, int]:
        generation, revision = self._read.with_revision(self._keys.generation, "generation")
        return generation or 0, revision

    def _read_epoch(self) -> tuple[EpochRecord | None, int]:
        """The current epoch and the revision to swap it at, after putting back a lost one of the same run."""
        while True:
            self._run.check()
            record, revision = self._read.with_revision(self._keys.epoch, "epoch")
            newest = self._remember(record)
            if newest is None or (record is not None and record.number >= newest.number):
                return record, revision
            # Fails when it was no loss: another thread has heard of the newest epoch since the entry was read.
            value, guard = encode(newest.to_json()), self._run.unclaimed
            if self._store.compare_and_swap(self._keys.epoch, value, revision=revision, guard=guard):
                logger.warning("the coordinator had lost epoch %d of job %s; put it back", newest.number, self.job)
            else:
                self._run.wait_for_claim()

    def _remember(self, record: EpochRecord | None) -> EpochRecord | None:
        """Note ``record`` if it is newer than what is known; returns the newest known."""
        with self._lock:
            if record is not None and (self._latest is None or record.number > self._latest.number):
                self._latest = record
            return self._latest

    def _swap(self, record: EpochRecord, revision: int, *, guard: tuple[str, int] | None = None) -> bool:
        value = encode(record.to_json())
        won = self._store.compare_and_swap(self._keys.epoch, value, revision=revision, guard=guard)
        if won:
            self._remember(record)
            self._forget_reports(record.number - 2)
        return won

    def _forget_reports(self, epoch_number: int) -> None:
        """Remove what was reported for an epoch that nobody works on any more."""
        if epoch_number < 0:
            return
        try:
            self._store.delete_prefix(self._keys.all_progress(epoch_number))
            self._store.delete_prefix(self._keys.reports(epoch_number))
            self._store.delete_prefix(self._keys.long_values(epoch_number))
            self._store.delete_prefix(self._keys.all_suspicions(epoch_number))
        except CoordinatorUnavailable as error:
            logger.info("reports of epoch %d not removed: %s", epoch_number, error)


def running_jobs(store: KeyValueStore, *, prefix: str = DEFAULT_PREFIX) -> list[str]:
    """The names of the jobs under ``prefix`` that have a live agent, in alphabetical order."""
    root = jobs_root(prefix)
    parts = (entry.key.removeprefix(root).split("/") for entry in store.read(root).entries)
    return sorted({part[0] for part in parts if part[1:2] == ["agent"]})
