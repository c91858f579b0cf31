"""One worker's part in memory checkpoints (``checkpoint.memory_interval_seconds``).

At an iteration boundary each worker copies the stages that it owns or shadows into its host memory, and a thread sends
those that it owns to further workers while training continues, over channels of its own. The agreements of iterations
say which boundary it is, and when all have their parts (``core/memory_rounds.py``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.utils import logger

from deepspeed_bamboo.config.section import CheckpointConfig
from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.memory_rounds import MemoryNote, MemoryProgress
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.sites import in_agreed_zones
from deepspeed_bamboo.core.restoring import Site, keepers
from deepspeed_bamboo.errors import BambooError, ExpelledError
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.job.sites import site_of
from deepspeed_bamboo.runtime.recovery.memory_parts import MemoryPart, MemoryParts, SealedPart, copied_part
from deepspeed_bamboo.runtime.recovery.part_sending import Pace, begun, receive_part, send_part

NOTE = "memory"
"""The key of a worker's note in what it contributes to an agreement."""

_GIGABYTE = 2**30
_SHARE_OF_FREE_MEMORY = 0.25
_SHARE_OF_TIME = 0.01
_LOOK_SECONDS = 0.01
_LEAST_SAID_SECONDS = 10.0


@dataclass
class _Round:
    """What this worker's thread has to do for the checkpoint of ``step``."""

    step: int
    own: list[MemoryPart]
    links: Links
    sending: dict[Coordinate, list[WorkerId]]
    arriving: dict[Coordinate, WorkerId]
    stopped: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)

    @property
    def partners(self) -> set[WorkerId]:
        """The workers that parts go to or come from."""
        return {worker for workers in self.sending.values() for worker in workers} | set(self.arriving.values())


class _Beside:
    """Channels for the thread, kept for as long as the epoch lasts."""

    def __init__(self, links: Links, record: EpochRecord, *, activity: int) -> None:
        """``activity``: at whose end they are made, the same on all workers. A step may come twice in an epoch."""
        self.epoch = record.number
        self._interruption = Interruption()
        self._interruption.enter(record)
        self.links = links.beside(self._interruption, name=f"memory/{activity}")

    def close(self) -> None:
        """All waits of the thread end."""
        self._interruption.announce_expulsion()
        self.links.close()


class MemoryRounds:
    """See the module. All methods are called in the main thread, between iterations but for :meth:`contribution`.

    Args:
        worker: whose stages are kept, and who keeps those of others.
        settings: how often, how many copies, and how much memory they may take.
    """

    def __init__(self, worker: Worker, settings: CheckpointConfig) -> None:
        self._worker = worker
        self._settings = settings
        self.share_of_time = _SHARE_OF_TIME
        """That copying may take, whatever the interval."""
        self.limit_bytes = limit_bytes(settings.memory_limit_gigabytes)
        self._interval_seconds = settings.memory_interval_seconds or 0.0
        self._said_how_often = False
        self._sizes: dict[Coordinate, int] = {}  # of the last copies that were seen here
        self.parts = MemoryParts()
        self.progress = MemoryProgress()
        self._round: _Round | None = None
        self._interrupted = False  # since the last boundary, where others may have begun a round before
        self._alone: _Round | None = None  # one that they may have given up then
        self._beside: _Beside | None = None
        self._taken_at: float | None = None
        self._taken_by: frozenset[WorkerId] = frozenset()
        self._to_take: int | None = None
        self._note = MemoryNote()  # what this worker has to say of the round in progress
        self._said_why_not = False

    # -- with each iteration -----------------------------------------------------------------------

    def contribution(self, *, step: int, wanted: bool) -> dict[str, Any]:
        """What this worker contributes to the agreement of the iteration that leads to ``step``.

        ``wanted``: whether the state of then may be gone back to.
        """
        take = step if self._worker.leads and wanted and self._is_due() else None
        note = MemoryNote(take, self._note.kept, self._note.failed)
        return {NOTE: note.to_plain()} if note != MemoryNote() else {}

    def note(self, agreed: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """After an iteration: take in what all have handed in."""
        notes = {
            w: MemoryNote.from_plain(value[NOTE]) if NOTE in value else MemoryNote() for w, value in agreed.items()
        }
        before, self.progress = self.progress, self.progress.after(notes)
        if before.step is not None and self.progress.step != before.step:
            self._note = MemoryNote()
            if before.step not in self.progress.complete:
                self._end_round()
                self.parts.keep_only(self.progress.wanted)
            elif self._beside is not None:
                self._beside.links.drain()
        if self.progress.step is not None and self.progress.step != before.step:
            self._to_take = self.progress.step

    def take_if_due(self) -> None:
        """At the boundary after an iteration: copy what this worker has, and begin to send it."""
        step, self._to_take = self._to_take, None
        interrupted, self._interrupted = self._interrupted, False
        if step is None:
            return
        host, record = self._worker.host, self._worker.record
        started = time.monotonic()
        self.parts.keep_only(self.progress.wanted)
        host.save()
        try:
            replicas = [replica for replica in host.replicas() if replica.complete]
            own = [copied_part(replica, host.description(replica), step=step) for replica in replicas]
            work = self._planned(step, own, record)
        except (BambooError, RuntimeError, MemoryError) as error:
            self._fail(step, str(error))
            return
        self._taken_at, self._taken_by = time.monotonic(), frozenset(record.members)
        self._set_interval(self._taken_at - started)
        self._round, self._alone = work, work if interrupted else None
        threading.Thread(target=self._spread, args=(work,), name="bamboo-memory", daemon=True).start()

    def wait(self) -> None:
        """Until the thread has done what there is to do, or there is a new epoch. For tests.

        Not for a round that only the next agreement ends: others have given it up.
        """
        interruption = self._worker.session.interruption
        while self._round is not None and self._round is not self._alone:
            if self._round.stopped.wait(_LOOK_SECONDS):
                return
            record = interruption.record
            if record is not None and record.number > interruption.epoch:
                return

    @property
    def first_wanted(self) -> int | None:
        """The oldest step that may be gone back to; None before there is any."""
        return min(self.progress.wanted, default=None)

    # -- otherwise ---------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """There is a new epoch: a round in progress comes to nothing."""
        self._interrupted = True
        if self._round is not None and not self._round.stopped.is_set():
            self._note = MemoryNote(failed=self._round.step)
        self._end_round()

    def restored(self, step: int) -> None:
        """All workers have gone back to ``step``, of which every coordinate is where it is to be kept."""
        self._end_round()
        self._note, self._to_take = MemoryNote(), None
        self.progress = MemoryProgress(complete=(step,))
        self.parts.keep_only((step,))

    def forget(self) -> None:
        """The state has become another one otherwise than by training: there is no way back to before."""
        self._end_round()
        self._note, self._to_take = MemoryNote(), None
        self.progress = MemoryProgress(due=True)
        self.parts.keep_only(())

    def keepers(self, placement: Placement, record: EpochRecord) -> dict[Coordinate, list[WorkerId]]:
        """Who keeps a copy of each coordinate, besides who owns or shadows it."""
        members = self._worker.links.members
        found = in_agreed_zones(site_of(members[worker]) for worker in record.members if worker in members)
        sites = {site.worker: Site(site.node, site.zone) for site in found}
        return keepers(placement, sites, copies=self._settings.memory_copies)

    def close(self) -> None:
        """The job has ended."""
        self._end_round()

    # -- parts -------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        if self.progress.step is not None:
            return False
        if self.progress.due or self._taken_at is None:
            return True
        if self._taken_by != frozenset(self._worker.record.members):
            # A newcomer may not be able to do again what was before it came; who left has taken copies along.
            return True
        return time.monotonic() - self._taken_at >= self._interval_seconds

    def _fail(self, step: int, reason: str) -> None:
        """This worker can't keep that one; the next is tried later, and later still each time."""
        self._note, self._taken_at = MemoryNote(failed=step), time.monotonic()
        self._taken_by = frozenset(self._worker.record.members)
        self._interval_seconds *= 2
        if not self._said_why_not:
            self._said_why_not = True
            tell(self._worker, f"no memory checkpoint is kept: {reason}")

    def _planned(self, step: int, own: list[MemoryPart], record: EpochRecord) -> _Round:
        """Raises BambooError where the copies would take more memory than they may."""
        placement, me = self._worker.placement, self._worker.me
        chosen = self.keepers(placement, record)
        arriving = {c: placement.owner(c) for c, workers in chosen.items() if me in workers}
        self._sizes.update({part.coordinate: part.size for part in own})
        self._check_memory(own, arriving=arriving)
        if self._beside is None or self._beside.epoch != record.number:
            self._end_round()
            self._beside = _Beside(self._worker.links, record, activity=self._worker.activity.index)
        sending = {c: workers for c, workers in chosen.items() if placement.owner(c) == me and workers}
        return _Round(step, own, self._beside.links, sending, arriving)

    def _set_interval(self, copying_seconds: float) -> None:
        """By what copying took this time: the next may be quicker. What failed before is no reason any more."""
        configured = self._settings.memory_interval_seconds or 0.0
        self._interval_seconds = max(configured, copying_seconds / self.share_of_time)
        longer = self._interval_seconds > max(2 * configured, _LEAST_SAID_SECONDS)
        if longer and self._worker.leads and not self._said_how_often:
            self._said_how_often = True
            tell(
                self._worker,
                f"copying stages for a memory checkpoint took {copying_seconds:.2f} s, so the next one is made after "
                f"{self._interval_seconds:.0f} s, not {configured:g} (checkpoint.memory_interval_seconds): it may take "
                "a hundredth of the time",
            )

    def _check_memory(self, own: list[MemoryPart], *, arriving: Collection[Coordinate]) -> None:
        """Copies of stages that were never here may be as large as the largest that was."""
        size = sum(part.size for part in own)
        largest = max((part.size for part in own), default=max(list(self._sizes.values()), default=0))
        others = sum(self._sizes.get(coordinate, largest) for coordinate in arriving)
        self._check_limit(2 * (size + others))

    def _check_limit(self, needed: int) -> None:
        if needed > self.limit_bytes:
            raise BambooError(
                f"two of them would take about {needed / _GIGABYTE:.2f} GB of this worker's host memory, and "
                f"{self.limit_bytes / _GIGABYTE:.2f} GB is the limit (checkpoint.memory_limit_gigabytes; null: a "
                "quarter of what was free when the job began)"
            )

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.given_up.set()
        beside, self._beside, self._round = self._beside, None, None
        if beside is not None:
            beside.close()

    # -- in a thread of its own --------------------------------------------------------------------

    def _spread(self, work: _Round) -> None:
        failure = "its thread has ended"
        try:
            sealed = {part.coordinate: SealedPart(part, part.sha256()) for part in work.own}
            for part in sealed.values():
                self._put(work, part)
            work.links.connect(work.partners)
            work.links.drain()
            pace = Pace(self._settings.memory_megabytes_per_second, given_up=work.given_up)
            # A piece travels when it is asked for: with a pace, what others send is asked for while this worker sends.
            received = begun(partial(self._receive_all, work)) if pace.piece_bytes is not None else None
            for coordinate, workers in work.sending.items():
                for worker in workers:
                    send_part(work.links, worker, f"{work.step}/{coordinate}", sealed[coordinate], pace=pace)
            if received is None:
                self._receive_all(work)
            else:
                received.result()
            failure = ""
        except ExpelledError:
            failure = "it was given up"
        except (PeerLostError, BambooError, RuntimeError, ValueError, MemoryError, OSError) as error:
            failure = str(error)
            logger.warning(f"{self._worker.me}: the memory checkpoint of step {work.step} fails here ({error})")
        finally:
            if self._round is work:
                self._note = MemoryNote(failed=work.step) if failure else MemoryNote(kept=work.step)
            work.stopped.set()

    def _put(self, work: _Round, sealed: SealedPart) -> None:
        if self._round is not work:
            raise ExpelledError("the round was given up")
        self.parts.put(sealed)

    def _receive_all(self, work: _Round) -> None:
        size = sum(part.size for part in work.own)
        for coordinate, owner in work.arriving.items():
            size += self._receive(work, coordinate, owner)
            self._check_limit(2 * size)  # what arrives may be larger than what was expected

    def _receive(self, work: _Round, coordinate: Coordinate, owner: WorkerId) -> int:
        """Returns its size."""
        sealed = receive_part(work.links, owner, f"{work.step}/{coordinate}")
        if not sealed.is_of(work.step, coordinate):
            raise PeerLostError(owner, f"its copy of {coordinate} arrived damaged")
        self._sizes[coordinate] = sealed.part.size
        self._put(work, sealed)
        return sealed.part.size


def limit_bytes(gigabytes: float | None) -> float:
    """What a worker's copies may take: as configured, or a share of what is free, for each worker of the machine."""
    if gigabytes is not None:
        return gigabytes * _GIGABYTE
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return float("inf")
    return _SHARE_OF_FREE_MEMORY * free / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def keeps_memory(worker: Worker) -> bool:
    """Whether this job keeps memory checkpoints: where it is told to, and keeps shadows."""
    return worker.session.config.remembers


def memory_rounds(worker: Worker) -> MemoryRounds | None:
    """As ``bamboo.checkpoint`` says; None where none are kept."""
    return MemoryRounds(worker, worker.session.config.checkpoint) if keeps_memory(worker) else None
