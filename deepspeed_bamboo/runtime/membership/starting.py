"""How a job begins: its seed, its first shadows and its first epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as deepspeed_comm

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.coordination.records import START
from deepspeed_bamboo.core.job_facts import JobFacts
from deepspeed_bamboo.core.peers import peers_of, tensor_peers
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.errors import BambooError, ConfigError
from deepspeed_bamboo.eventlog.runs import run_name
from deepspeed_bamboo.runtime.comm.all_gather import agree
from deepspeed_bamboo.runtime.comm.epoch_monitor import PeerLostError
from deepspeed_bamboo.runtime.iteration.data_streams import DataStreams
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell, tell_once
from deepspeed_bamboo.runtime.job.standalone import is_standalone
from deepspeed_bamboo.runtime.membership.own_facts import common_facts
from deepspeed_bamboo.runtime.recovery.memory_rounds import keeps_memory
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.stock.sparse_gradients import REMEDY, sparse_layers

_LAST_MESSAGES_SECONDS = 5.0


def agreed_seed(configured: int | None, *, device: torch.device) -> int:
    """The seed of all forwards: ``configured``, else that of the first worker's generator; collective."""
    seed = torch.tensor([configured if configured is not None else torch.initial_seed() % 2**63]).to(device)
    deepspeed_comm.broadcast(seed, src=0)
    return int(seed.item())


@dataclass(frozen=True)
class Built:
    """What the start has to know of what stock has built here.

    ``alike``: pipelines hold the same whole state. ``facts`` returns what workers are compared by, ``problem`` why no
    other worker can make the optimizer, or None, and ``recounts`` whether repeated forwards change running statistics.
    ``streams`` learns what loaders of ``training_data`` draw.
    """

    alike: bool
    facts: Callable[[], JobFacts]
    problem: Callable[[], str | None]
    recounts: Callable[[], bool]
    streams: DataStreams


def enter_first_epoch(
    worker: Worker, *, transfer: StateTransfer, built: Built, enter_world: Callable[[EpochRecord], None]
) -> None:
    """Meet the other workers, make shadows, enter epoch 0; collective. Raises BambooError when one does not come.

    ``enter_world`` makes the members of an epoch torch's default process group.
    """
    session, start, grid = worker.session, worker.session.start, worker.grid
    rank = deepspeed_comm.get_rank()
    session.register(rank=rank if start is None else start.seat.index, home=rank)
    members = session.members(expected=len(grid) if start is None else start.seat.workers)
    order = tuple(sorted(members, key=lambda worker: members[worker].rank))
    record = _build_initial_shadows(worker, transfer=transfer, built=built, members=members, order=order)
    worker.view.adopt(record, record.placement)
    if not record.placement.hosted_by(session.worker):
        worker.host.set_aside()
    # Stock's groups have done their work; none of them may be left to hang on a lost peer.
    if not is_standalone(os.environ):
        enter_world(record)
    if start is not None:
        start.workers.close()
    if worker.protects and not record.placement.shadows:
        tell_once(
            worker,
            f"redundancy is {session.config.redundancy.mode}, but one worker hosts everything, and nobody can stand in "
            f"for it: {_after_its_loss(session.config)}. Start two workers or more to survive it",
        )
    elif not worker.protects and all(record.placement.without([member])[0] is None for member in order):
        tell_once(
            worker,
            f"redundancy.mode is off, so nobody can stand in for any worker: {_after_its_loss(session.config)}",
        )
    elif record.placement.copies > 1:
        tell_once(worker, _of_second_shadows(record.placement))
    if session.config.checkpoint.memory_interval_seconds is not None and not keeps_memory(worker):
        tell_once(
            worker,
            "checkpoint.memory_interval_seconds is set, but with redundancy.mode off no memory checkpoints are kept: a "
            "loss of the last live copy of a stage ends the job. Set checkpoint.dir to continue from there",
        )


def _of_second_shadows(placement: Placement) -> str:
    if len(placement.second_shadows) == len(placement.grid):
        return "every stage has two shadows: any two workers may be lost at once, and no step is done again"
    workers = len(placement.holders)
    return (
        f"redundancy.copies is 2, but with {workers} workers a stage has one shadow: the loss of one worker at a time "
        "is survived. Start three workers or more for two shadows"
    )


def _after_its_loss(config: BambooConfig) -> str:
    if config.waits_seconds:
        return "its loss has the job start anew from checkpoint.dir"
    if config.checkpoint.dir is not None:
        return "its loss ends the job, and the same command continues from checkpoint.dir"
    return "its loss ends the job, and the same command begins at the first step, since checkpoint.dir is not set"


def _paths(config: BambooConfig) -> dict[str, str | None]:
    """Where this worker will write, by setting."""
    return {"checkpoint.dir": config.checkpoint.dir, "event_log": config.event_log}


def _say_where_paths_differ(worker: Worker, told: Mapping[WorkerId, Mapping[str, str | None]]) -> None:
    """Settings are the same everywhere, but ``~``, variables and relative paths mean what they mean on each node."""
    first = next(iter(told))
    for name, expected in told[first].items():
        others = {other: paths[name] for other, paths in told.items() if paths[name] != expected}
        if others and worker.me == first:
            found = ", ".join(f"{path} on {other}" for other, path in others.items())
            tell(
                worker,
                f"{name} is {expected} on {first}, but {found}; give a path that means the same on every node, for "
                "workers write what others read",
            )


def _say_what_recounts(worker: Worker, told: Mapping[WorkerId, bool]) -> None:
    if any(told.values()) and worker.me == next(iter(told)):
        tell(
            worker,
            "activation checkpoints repeat forwards of layers that have running statistics (batch norm): these count "
            "each micro-batch twice, as in stock DeepSpeed, in an order that depends on who hosts what. After a loss, "
            "or on fewer workers than stages, running statistics differ in last bits from those of an undisturbed run. "
            "Parameters, optimizer state and training losses stay equal. activation_checkpoint_interval=0 avoids it",
        )


def refuse_unlike(worker: Worker, problems: Sequence[str]) -> None:
    """Raise ConfigError, the same on all workers, where a replica can't be made what its owner is."""
    if problems:
        worker.links.flush(within_seconds=_LAST_MESSAGES_SECONDS)  # the others must get this, not a lost worker
        raise ConfigError(
            *problems,
            "do what makes the difference in the layer's own constructor (its LayerSpec), or in a function given as "
            'optimizer, which every worker can call for any stage; or set bamboo.redundancy.mode to "off"',
            where="another worker could not stand in for these stages: a replica of them would differ",
        )


def _sparse_layers(worker: Worker) -> list[str]:
    """Those of this worker's own stages whose gradients can't be sent to shadows."""
    owned = worker.host.owners() if worker.protects else ()
    return [layer for replica in owned for layer in sparse_layers(replica.module)]


def refuse_sparse(worker: Worker, layers: Sequence[str]) -> None:
    """Raise ConfigError, the same on all workers, where ``layers`` have sparse gradients."""
    if layers:
        worker.links.flush(within_seconds=_LAST_MESSAGES_SECONDS)
        raise ConfigError(
            *(f"layer {layer} has sparse gradients; {REMEDY}" for layer in dict.fromkeys(layers)),
            where="gradients are sent to shadows, and sparse ones can't be",
        )


def _first_epoch(worker: Worker, *, order: tuple[WorkerId, ...], alike: bool) -> EpochRecord:
    """The epoch with which workers in this ``order`` begin, the same on each. In a start anew it follows the last."""
    session = worker.session
    before = session.with_retries(session.coordinator.epoch)
    now_seconds = time.time()
    return EpochRecord(
        number=0 if before is None or before.trains else before.number + 1,
        members=order,
        # Without shadows too: where another pipeline holds the same, nothing has to be kept for a loss.
        placement=Placement.initial(
            worker.grid, order, protected=worker.protects, alike=alike, copies=session.config.redundancy.copies
        ),
        reason=START,
        lost=(),
        proposer=session.worker,
        time_seconds=now_seconds,
        goes_back=session.config.goes_back,
        waits_seconds=0.0 if is_standalone(os.environ) else session.config.waits_seconds,
        generation=session.coordinator.own_generation,
        stores=session.config.checkpoint.dir is not None,
        run=run_name(session.identity.job, time_seconds=now_seconds) if before is None else before.run,
    )


def _build_initial_shadows(
    worker: Worker,
    *,
    transfer: StateTransfer,
    built: Built,
    members: Mapping[WorkerId, Member],
    order: tuple[WorkerId, ...],
) -> EpochRecord:
    """Make every worker's first shadows and the job's first epoch; collective. Returns the epoch.

    Raises BambooError when a worker dies meanwhile: nothing has been trained, so nothing is lost.
    """
    session = worker.session
    record = _first_epoch(worker, order=order, alike=built.alike)
    placement = record.placement
    worker.links.enter(members=members, order=order, name=f"{session.identity.job}/start")
    try:
        worker.links.connect(
            peers_of(placement, session.worker, members=order), with_lanes=tensor_peers(placement, session.worker)
        )
        unlike = transfer.copy_shadows(placement, shadows=placement.all_shadows, label="start", attributes=True)
        everybody: dict[str, Any] = {"me": session.worker, "workers": order}
        # First what was started otherwise: it makes replicas differ, too, and is the better word for it.
        common = common_facts(agree(built.facts(), links=worker.links, **everybody, label="start/copied"))
        problem = built.problem() if worker.protects else None
        unlike = unlike if problem is None else (*unlike, f"the optimizer of worker {session.worker}: {problem}")
        found = agree(unlike, links=worker.links, **everybody, label="start/alike")
        refuse_unlike(worker, [text for other in order for text in found[other]])
        own = _paths(session.config), built.recounts(), built.streams.claim(), _sparse_layers(worker), record.run
        told = agree(own, links=worker.links, **everybody, label="start/told")
        refuse_sparse(worker, [layer for other in order for layer in told[other][3]])
        _say_where_paths_differ(worker, {other: its[0] for other, its in told.items()})
        _say_what_recounts(worker, {other: its[1] for other, its in told.items()})
        built.streams.learn({other: its[2] for other, its in told.items()}, placement=placement)
        record = replace(record, run=told[order[0]][4])
        if order[0] == session.worker:
            session.coordinator.publish_facts(common.to_json())
        expected = record.number - 1 if record.number else None
        if order[0] == session.worker and not session.coordinator.propose(record, expected=expected):
            raise BambooError(f"job {session.identity.job} has an epoch already; give this job another name (--job)")
        agree(None, links=worker.links, me=session.worker, workers=order, label="start/proposed")
        worker.links.drain()
    except PeerLostError as error:
        raise BambooError(f"a worker was lost before training began: {error}") from error
    return record
