"""A worker that comes to a running job: its script runs from the top, and it is taken in at an iteration boundary.

Until then the script sees a process group of the job's size in which this worker is alone: collectives give back what
they are given. What stock DeepSpeed builds with it is a stage that this worker may be given; its values come from the
others (``reconfiguration.py`` has their side, ``late_worker.py`` the moment).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from deepspeed.utils import logger

from deepspeed_bamboo.coordination import EpochRecord, JobCoordinator, Member
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.reconfiguring import Target
from deepspeed_bamboo.errors import (
    BambooError,
    ConfigError,
    DrainedError,
    ExpelledError,
    JobFailedError,
    JobStoppedError,
)
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.session import WorkerIdentity, WorkerSession
from deepspeed_bamboo.runtime.membership.common_state import CommonState
from deepspeed_bamboo.runtime.membership.reconfiguration import WELCOME, Reconfiguration, expected_coordinate
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.world import AloneGroup, replace_default_group

# How often a worker that waits looks whether the job has ended meanwhile.
_LOOK_SECONDS = 0.5


@contextmanager
def alone_in_the_group(
    environment: Mapping[str, str], coordinator: JobCoordinator, *, groups: ScriptGroups
) -> Iterator[None]:
    """Inside, torch's default process group looks like the job's, and nobody else is asked.

    Its size is that of the job's grid, and this worker's rank in it is that of the coordinate that it will most
    likely be given; ``groups`` are those that its script makes. ``torch.distributed.init_process_group``, which many
    scripts call, does nothing inside.
    Raises BambooError when the job has no epoch to join.
    """
    record = coordinator.epoch()
    if record is None:
        raise BambooError(f"job {coordinator.job} has not begun to train, so nobody can join it yet; try again later")
    identity = WorkerIdentity.from_environment(environment)
    me = Member(identity.worker, identity.node, identity.zone, identity.address, 0, os.getpid(), 0, joining=True)
    rank = record.placement.grid.rank(expected_coordinate(record, coordinator.members().values(), me))
    replace_default_group(AloneGroup(rank, len(record.placement.grid), groups=groups))
    stock = c10d.init_process_group
    c10d.init_process_group = lambda *args, **kwargs: None
    try:
        yield
    finally:
        c10d.init_process_group = stock


def join(worker: Worker, *, reconfiguration: Reconfiguration, common: CommonState, known: Callable[[], None]) -> None:
    """Register, wait to be taken in, and take part in that; returns when this worker is one of the job's.

    ``common`` is at the job's global step then; ``known`` is called as soon as it is. Raises JobStoppedError when the
    job ends first, and as the job's own activities do.
    """
    session, interruption = worker.session, worker.session.interruption
    worker.host.set_aside()
    session.register(rank=int(os.environ.get("RANK", "0")), home=c10d.get_rank())
    while not interruption.wait_until(lambda: interruption.record is not None, timeout_seconds=_LOOK_SECONDS):
        if session.finished:
            raise JobStoppedError(f"job {session.identity.job} was complete before this worker could join it")
    record = interruption.record
    if record is None or record.lost or record.placement.hosted_by(session.worker):
        raise ExpelledError(f"worker {session.worker} was not taken in as planned; its agent starts another one")
    try:
        welcome = session.with_retries(lambda: session.coordinator.long_value(record.number, WELCOME))
    except EpochChangedError:
        welcome = None
    if welcome is None:
        raise ExpelledError(f"worker {session.worker} came too late for epoch {record.number}")
    target = Target.from_json(welcome["target"])
    worker.view.adopt(record, Placement.from_json(welcome["placement"]))
    worker.activity.index = welcome["activity"]
    with _stepping_back(worker):
        common.take(welcome["known"])
        worker.host.save()
        known()
        _take_part(worker, record, target, reconfiguration)


def _take_part(worker: Worker, record: EpochRecord, target: Target, reconfiguration: Reconfiguration) -> None:
    with contextlib.suppress(EpochChangedError):  # whoever is lost meanwhile: the reconfiguration recovers from that
        worker.links.enter(
            members=_registered(worker, record.members),
            order=record.members,
            name=f"{worker.session.identity.job}/{record.number}",
        )
    # The others have had an agreement before this worker came.
    worker.activity.rounds.append({})
    reconfiguration.carry_out(record.number, target)


@contextmanager
def _stepping_back(worker: Worker) -> Iterator[None]:
    """Inside, an error of this worker costs nobody else: it holds nothing yet that the others count on."""
    try:
        yield
    except (JobFailedError, JobStoppedError, DrainedError, ExpelledError):
        raise
    except Exception as error:
        if worker.me in worker.record.placement.holders:
            raise
        logger.exception(f"worker {worker.me} can't take its part in the job")
        what = f"{type(error).__name__}: {error}"
        raise ExpelledError(
            f"worker {worker.me} can't take its part, and the job continues without it ({what})"
        ) from error


def _registered(worker: Worker, wanted: Sequence[WorkerId]) -> dict[WorkerId, Member]:
    """All that are registered, once those ``wanted`` are: a registration that is being renewed is away for a moment.

    Raises what interrupts the wait: one that is lost makes a new epoch.
    """
    session = worker.session
    members = session.with_retries(session.coordinator.members)
    while not members.keys() >= set(wanted):
        session.interruption.wait_until(lambda: False, timeout_seconds=_LOOK_SECONDS)
        members = session.with_retries(session.coordinator.members)
    return members


def check_grid(session: WorkerSession, built: Grid) -> None:
    """Raise ConfigError for a script with other arguments, before the job learns of this worker."""
    record = session.coordinator.epoch()
    needed = built if record is None else record.placement.grid
    if built != needed:
        raise ConfigError(
            f"this script builds a grid of {built.pipelines} x {built.stages} (pipelines x stages), but the job that "
            f"it joins has {needed.pipelines} x {needed.stages}; run the same script with the same arguments"
        )
