"""From an interrupted wait to a plan for the rest of the iteration: abort, agree, regroup (architecture 5).

Another loss meanwhile makes another epoch, and this starts over with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.core.consensus import Conclusion, Report, conclude
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.peers import peers_of, tensor_peers
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.errors import BambooError, ExpelledError
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.job.view import CurrentView
from deepspeed_bamboo.runtime.recovery.reports import exchange_reports

# A watch tells of new epochs at once; this bounds the damage of a lost one.
_LOOK_AGAIN_SECONDS = 0.5
_MISSING_SECONDS = 0.05

PAUSE = "pause"
"""The name under which a worker reports its pause: the epoch, whether it took anything over, and the parts."""


@dataclass
class PauseClock:
    """Wall-clock times of one failover, for its event."""

    stalled: float = 0.0
    epoch_seen: float = 0.0
    aborted: float = 0.0
    regrouped: float = 0.0
    first_recomputed: float = 0.0
    caught_up: float = 0.0
    lost: tuple[WorkerId, ...] = ()
    taken_over: dict[Coordinate, tuple[int, int]] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=lambda: {"forwards": 0, "backwards": 0})

    def parts(self, *, lost_at: float | None) -> dict[str, float]:
        """Seconds of each part. ``lost_at`` is when the loss was proposed, the earliest common sign of it."""
        start = min(t for t in (self.stalled, self.epoch_seen, lost_at or self.epoch_seen) if t)
        end = max(self.caught_up, self.first_recomputed, self.regrouped)
        return {
            "detect": max(0.0, self.epoch_seen - start),
            "abort": max(0.0, self.aborted - self.epoch_seen),
            "regroup": max(0.0, self.regrouped - self.aborted),
            "recompute": max(0.0, end - self.regrouped),
            "total": max(0.0, end - start),
        }


def agreed_pause(agreed: Mapping[str, Mapping[str, Any]], *, epoch: int) -> dict[str, float] | None:
    """The pause of the job, in parts, by what its workers have handed in for ``epoch``; None if nobody has.

    It is that of a worker that took over what was lost, which noticed the loss by itself and had to recompute; of
    several, or if nobody took anything over, the longest.
    """
    handed_in = [value[PAUSE] for value in agreed.values() if PAUSE in value]
    pauses = [(took_over, parts) for number, took_over, parts in handed_in if number == epoch]
    if not pauses:
        return None
    return dict(max(pauses, key=lambda pause: (pause[0], pause[1]["total"]))[1])


class Recovery:
    """Brings one worker into the newest epoch.

    Args:
        session: the worker's job.
        links: the channels, dropped and rebuilt here.
        view: where the newest epoch is entered, with the placement before, until its own is planned.
        report: what this worker has to report, asked for once per epoch.
        suspicion_seconds: how long a failed transfer waits for the verdict of the lease or the agent
            before this worker proposes the loss itself.
        point: called with the name of each of ``faults.RECOVERY_POINTS`` on the way.
    """

    def __init__(
        self,
        session: WorkerSession,
        *,
        links: Links,
        view: CurrentView,
        report: Callable[[], Report],
        suspicion_seconds: float,
        point: Callable[[str], None],
    ) -> None:
        self._session = session
        self._links = links
        self._view = view
        self._report = report
        self._suspicion_seconds = suspicion_seconds
        self._point = point

    def recover(
        self, cause: EpochChangedError | PeerLostError, *, placement: Placement
    ) -> tuple[EpochRecord, Conclusion, PauseClock]:
        """Return the newest epoch, with channels for it, and what its members concluded.

        ``placement`` is the one before. Raises JobFailedError or ExpelledError.
        """
        interruption = self._session.interruption
        interruption.expect(None)
        clock = PauseClock(stalled=time.time() if isinstance(cause, PeerLostError) else 0.0)
        while True:
            # Its frames hold a channel, which takes its time to go and must not do so in this thread.
            cause.__traceback__ = cause.__cause__ = cause.__context__ = None
            try:
                if isinstance(cause, PeerLostError):
                    self._await_verdict(cause)
                record = interruption.record
                if record is None or record.number <= interruption.epoch:
                    raise BambooError(f"interrupted without a new epoch: {cause}")
                if self._session.worker not in record.members:
                    raise ExpelledError(f"epoch {record.number} does not include this worker: {record.reason}")
                self._view.adopt(record, placement)
                clock.epoch_seen = clock.epoch_seen or interruption.seen_seconds
                self._point("interrupted")
                self._links.close()
                clock.aborted = time.time()
                conclusion = conclude(self._reports_of(record))
                self._regroup(record)
                clock.regrouped = time.time()
                gone = {worker for _, worker in placement.owners} - set(record.members)
                clock.lost = tuple(sorted(gone))
                return record, conclusion, clock
            except (EpochChangedError, PeerLostError) as again:
                cause = again

    def _await_verdict(self, cause: PeerLostError) -> None:
        """Wait for an epoch without the silent peer; propose it when nobody else does."""
        interruption, coordinator, me = self._session.interruption, self._session.coordinator, self._session.worker
        epoch = interruption.epoch
        if cause.farewell:
            self._await_epoch()
            return
        try:
            self._session.with_retries(
                lambda: coordinator.report_suspicion(epoch, reporter=me, suspect=cause.peer, reason=cause.cause)
            )
            interruption.wait_until(lambda: False, timeout_seconds=self._suspicion_seconds)
        except EpochChangedError:
            return
        reason = f"no answer to {me}: {cause.cause}"
        record = self._session.with_retries(
            lambda: coordinator.propose_loss([cause.peer], reason=reason, proposer=me, judge=me)
        )
        failure = self._session.with_retries(coordinator.failure)
        if failure is not None:
            interruption.announce_failure(failure)
            interruption.check()
        interruption.announce_epoch(record)

    def _await_epoch(self) -> None:
        """A live peer knows of a newer epoch: wait until it is seen here too, looking for it in between."""
        interruption = self._session.interruption
        while True:
            try:
                interruption.wait_until(lambda: False, timeout_seconds=_LOOK_AGAIN_SECONDS)
            except EpochChangedError:
                return
            record = self._session.with_retries(self._session.coordinator.epoch)
            if record is not None:
                interruption.announce_epoch(record)

    def _reports_of(self, record: EpochRecord) -> dict[WorkerId, Report]:
        own = self._report()
        return exchange_reports(own, record, session=self._session, handed_in=lambda: self._point("reported"))

    def _regroup(self, record: EpochRecord) -> None:
        self._point("regroup")
        self._links.enter(
            members=self._registered(record),
            order=record.members,
            name=f"{self._session.identity.job}/{record.number}",
        )
        worker = self._session.worker
        self._links.connect(
            peers_of(record.placement, worker, members=record.members),
            with_lanes=tensor_peers(record.placement, worker),
        )

    def _registered(self, record: EpochRecord) -> dict[WorkerId, Member]:
        """All members of ``record``. Those that come back after an outage of the coordinator get the time for it."""
        me, deadline = self._session.worker, time.monotonic() + self._suspicion_seconds
        while True:
            members = self._session.with_retries(self._session.coordinator.members)
            missing = [worker for worker in record.members if worker not in members]
            if not missing:
                return {worker: members[worker] for worker in record.members}
            others = [worker for worker in missing if worker != me]
            if others and time.monotonic() > deadline:
                raise PeerLostError(others[0], "its registration is gone")
            self._session.interruption.wait_until(lambda: False, timeout_seconds=_MISSING_SECONDS)
