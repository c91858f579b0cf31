"""What connects one worker process to its job: identity, coordinator, epoch monitor, event log, fault script."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deepspeed_bamboo import news
from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import (
    Change,
    CoordinatorUnavailable,
    Drain,
    EpochRecord,
    JobCoordinator,
    Member,
    SharedRegistration,
)
from deepspeed_bamboo.coordination.process_state import is_left_alone
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.core.roles import reporter
from deepspeed_bamboo.errors import BambooError, ConfigError
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.faults import Fault, FaultScript
from deepspeed_bamboo.protocol import ADDRESS, ENDPOINTS, JOB, JOINING, NODE, PREFIX, SECRET, WORKER, ZONE
from deepspeed_bamboo.pulse import Pulse
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.retry import with_retries
from deepspeed_bamboo.runtime.comm.store_server import StoreServer
from deepspeed_bamboo.runtime.job.long_works import LongWorks
from deepspeed_bamboo.runtime.job.past_results import PastResults
from deepspeed_bamboo.runtime.job.start import Start
from deepspeed_bamboo.runtime.job.status import StatusTeller

T = TypeVar("T")

START_SECONDS = 1800.0
"""How long workers wait for each other at the start: as long as torch's collectives wait by default."""
_SAY_AFTER_SECONDS = 60.0


@dataclass(frozen=True)
class WorkerIdentity:
    """Who this worker is, as its agent told it through the environment."""

    job: str
    worker: str
    node: str
    zone: str
    endpoints: tuple[str, ...]
    prefix: str
    address: str
    secret: str = field(repr=False)
    joining: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerIdentity:
        """Raises ConfigError when the process was not started by an agent."""
        endpoints = tuple(part for part in environment.get(ENDPOINTS, "").split(",") if part)
        if not endpoints or JOB not in environment or not environment.get(SECRET):
            raise ConfigError(
                "bamboo is enabled, but this process has no agent: BAMBOO_ENDPOINTS, BAMBOO_JOB and "
                "BAMBOO_SECRET are not set. "
                "Start the script with: deepspeed --module deepspeed_bamboo.launch your_script.py ..., or set "
                '"enabled": false in the "bamboo" section.'
            )
        return cls(
            job=environment[JOB],
            worker=environment[WORKER],
            node=environment.get(NODE, socket.gethostname()),
            zone=environment.get(ZONE, "unknown"),
            endpoints=endpoints,
            prefix=environment.get(PREFIX, "/deepspeed_bamboo"),
            address=environment.get(ADDRESS) or _own_address(environment.get("MASTER_ADDR", "127.0.0.1")),
            secret=environment[SECRET],
            joining=environment.get(JOINING) == "1",
        )


def _own_address(master: str) -> str:
    """The address under which the other workers reach this one: that of the interface that leads to the master."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _store_server(identity: WorkerIdentity) -> StoreServer:
    """Raises ConfigError when the worker's address is not one of this machine's."""
    try:
        return StoreServer(identity.address, secret=identity.secret)
    except OSError as error:
        raise ConfigError(
            f"worker {identity.worker} can't listen on {identity.address!r} ({error.strerror or error}): that is no "
            f"address of this machine; set {ADDRESS} to one that the other machines reach, or leave it out"
        ) from error


class WorkerSession:
    """One worker's connection to its job, from registration to withdrawal."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        coordinator: JobCoordinator,
        config: BambooConfig,
        etcd: PrivateEtcd | None = None,
        start: Start | None = None,
    ) -> None:
        """``start``: where the job starts on fewer or more workers than it has coordinates."""
        self.identity = identity
        self.start = start
        # In a standalone job on rank 0: the job's server, which goes with this object.
        self._etcd = etcd
        self.coordinator = coordinator
        self.config = config
        self.pulse = Pulse.of_worker(os.environ)
        self.interruption = Interruption(on_wait=self.pulse.waits)
        self.faults = FaultScript.of_job(config.faults)
        self.events = EventLog(config.event_log, identity.worker)
        # Who comes later belongs to the run that there is; the others are given its name with their first epoch.
        self._name_run(with_retries(coordinator.peek_epoch, interruption=self.interruption))
        self.past = PastResults(coordinator)
        self._status = StatusTeller(coordinator, worker=identity.worker, past=self.past)
        self.works = LongWorks(coordinator, worker=identity.worker)
        # Rendezvous server of every epoch in which this worker is the first one.
        self.store = _store_server(identity)
        self._registration: SharedRegistration | None = None
        # What the watch has told last; read by the main thread.
        self._present: dict[str, Member] = {}
        self._draining: dict[str, Drain] = {}
        self._stop: str | None = None
        self._finished = False
        self._published: dict[int, dict[str, dict[str, Any]]] = {}
        self._watch: Any = None
        self.closed = False

    @property
    def worker(self) -> str:
        """This worker's id."""
        return self.identity.worker

    def register(self, *, rank: int, home: int) -> None:
        """Become visible to the others, and start to watch epochs.

        ``rank``: of the slot; ``home``: the one that the script has, see :class:`Member`.
        """
        self._watch = self.coordinator.watch(self._on_change)
        self._registration = self.coordinator.register(
            Member(
                worker=self.worker,
                node=self.identity.node,
                zone=self.identity.zone,
                address=self.identity.address,
                store_port=self.store.port,
                pid=os.getpid(),
                rank=rank,
                joining=self.identity.joining,
                home=home,
            ),
            lease_seconds=self.config.coordinator.lease_seconds,
            in_charge=is_left_alone(os.environ),
        )

    def members(self, *, expected: int, timeout_seconds: float = START_SECONDS) -> dict[str, Member]:
        """All registered workers, once there are ``expected`` of them. Raises BambooError after the time-out.

        The scripts of some may prepare data first. A worker that is lost meanwhile ends the wait.
        """
        began, said = time.monotonic(), False
        while True:
            members = self.coordinator.members()
            if len(members) >= expected:
                return members
            waited_seconds = time.monotonic() - began
            if waited_seconds > min(_SAY_AFTER_SECONDS, timeout_seconds) and not said:
                said = True
                if self.worker == min(members, default=""):
                    here = f"{len(members)} of {expected} workers have come to deepspeed.initialize so far"
                    news.tell(
                        f"{here}: {sorted(members)}; they wait {timeout_seconds:.0f} s for the others", who=self.worker
                    )
            if waited_seconds > timeout_seconds:
                raise BambooError(
                    f"{len(members)} of {expected} workers registered within {timeout_seconds:.0f} s: "
                    f"{sorted(members)}; look at the output of the missing ones"
                )
            self.interruption.check()
            time.sleep(0.02)

    def with_retries(self, call: Callable[[], T]) -> T:
        """What ``call`` gets from the coordinator, through an outage as long as that takes; see there."""
        return with_retries(call, interruption=self.interruption)

    @property
    def present(self) -> dict[str, Member]:
        """The registered workers, as last heard of; those that wait to be taken in among them."""
        return dict(self._present)

    @property
    def draining(self) -> dict[str, Drain]:
        """The nodes that are to be left, as last heard of."""
        return dict(self._draining)

    def published(self, epoch: int) -> dict[str, dict[str, Any]]:
        """What was published as progress of ``epoch``, by name, as last heard of."""
        return dict(self._published.get(epoch, {}))

    @property
    def stop_reason(self) -> str | None:
        """Why the job is to end at the next boundary, as last heard of; None: it is not."""
        return self._stop

    @property
    def finished(self) -> bool:
        """Whether the job has been declared complete, as last heard of."""
        return self._finished

    def log(self, event: str, *, step: int, **fields: Any) -> None:
        """Write an event to this worker's event log; what onlookers want to know is also published."""
        record = self.interruption.active
        self._name_run(record)
        self.events.log(event, epoch=self.interruption.epoch, step=step, **fields)
        if event == "step":
            self.pulse.stepped(step + 1)
            self.past.note_loss(step, fields.get("loss"))
        reports = record is not None and reporter(record.members) == self.worker
        self._status.note(event, step=step, reporter=reports, fields=fields)

    def _name_run(self, record: EpochRecord | None) -> None:
        if record is not None and record.run:
            self.events.run = record.run

    def strike(self, fault: Fault, *, step: int) -> None:
        """Carry out a scripted fault on this process: the signal reaches it before this returns (or never).

        Once in a job: whoever was hit at the start of a step may have been ahead of all others, for whom the step in
        which they take its coordinate over then looks like the first time that it is there.
        """
        if not self._is_first_to_cause(fault):
            return
        self.log("fault", step=step, fault=fault.to_json())
        number = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}.get(fault.signal)
        if number is not None:
            os.kill(os.getpid(), number)
        elif fault.signal == "NOTICE":
            self.coordinator.request_drain(
                self.identity.node, deadline_seconds=fault.seconds, reason=f"scripted notice at step {step}"
            )

    def _is_first_to_cause(self, fault: Fault) -> bool:
        try:
            return self.coordinator.claim_fault(fault.name)
        except CoordinatorUnavailable:
            return True  # a script is for tests; one that also takes the coordinator away means this fault, too

    def finish(self, *, step: int) -> None:
        """Tell the job that it is complete. Out of reach of the coordinator that is left to the agents.

        They know it once the scripts of all members have ended, and are told so by those scripts' exit codes.
        """
        with contextlib.suppress(CoordinatorUnavailable):
            self.coordinator.finish({"step": step})

    def close(self) -> None:
        """Withdraw and stop watching. The job continues without this worker."""
        self.closed = True
        self._status.close()
        if self._watch is not None:
            self._watch.stop()
        if self._registration is not None:
            self._registration.withdraw()
        self.events.close()

    def _on_change(self, change: Change) -> None:
        if change.kind in ("epoch", "resync"):
            record = change.value if isinstance(change.value, EpochRecord) else self.coordinator.epoch()
            taken_in = self.identity.joining and record is not None and self.worker in record.members
            if record is not None and (self.interruption.epoch >= 0 or taken_in):
                self.interruption.announce_epoch(record)
                if self.worker not in record.members and not self.interruption.foresees(record):
                    self.interruption.announce_expulsion(*([] if record.trains else [record.reason]))
        self._note_who_comes_and_goes(change)
        if change.kind in ("failure", "resync"):
            failure = self.coordinator.failure()
            if failure is not None:
                self.interruption.announce_failure(failure)
        self.interruption.notify()

    def _note_who_comes_and_goes(self, change: Change) -> None:
        if change.kind == "member":
            self._present = _changed(self._present, change)
        elif change.kind == "drain":
            self._draining = _changed(self._draining, change)
        elif change.kind == "stop":
            self._stop = change.value
        elif change.kind == "finished":
            self._finished = change.value is not None
            if self._finished:
                self.interruption.announce_completion()
        elif change.kind == "progress" and change.value is not None:
            recent = {number: found for number, found in self._published.items() if number >= change.epoch - 1}
            known = recent.get(change.epoch, {})
            self._published = {**recent, change.epoch: {**known, change.worker: change.value}}


def _changed(known: dict[str, Any], change: Change) -> dict[str, Any]:
    """A new mapping, since another thread may be reading the one there is."""
    rest = {name: value for name, value in known.items() if name != change.worker}
    return rest if change.value is None else {**rest, change.worker: change.value}
