"""Shadows: made at the start, and made again at an iteration boundary after a loss (DESIGN 5, point 6)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.errors import BambooError, ShadowError
from deepspeed_bamboo.runtime.agreement import agree
from deepspeed_bamboo.runtime.channel import Message
from deepspeed_bamboo.runtime.interruption import PeerLostError
from deepspeed_bamboo.runtime.recovery import peers_of, tensor_peers
from deepspeed_bamboo.runtime.replica import StageReplica
from deepspeed_bamboo.runtime.transfer import PackedState, checksum, pack_state, unpack_state

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def build_initial_shadows(
    engine: BambooPipelineEngine, *, members: Mapping[WorkerId, Member], order: tuple[WorkerId, ...], grid: Grid
) -> EpochRecord:
    """Make every worker's first shadows and the job's first epoch; collective. Returns the epoch.

    Raises BambooError when a worker dies meanwhile: nothing has been trained, so nothing is lost.
    """
    session = engine.session
    alike = engine.protects and not engine.zero_optimization()
    placement = Placement.initial(grid, order, protected=engine.protects, alike=alike)
    record = EpochRecord(
        number=0,
        members=order,
        placement=placement,
        reason="start",
        lost=(),
        proposer=session.worker,
        time_seconds=time.time(),
    )
    engine.links.enter(members=members, order=order, name=f"{session.identity.job}/start")
    try:
        engine.links.connect(
            peers_of(placement, session.worker, members=order), with_lanes=tensor_peers(placement, session.worker)
        )
        copy_shadows(engine, placement, shadows=dict(placement.shadows), label="start")
        agree(None, links=engine.links, me=session.worker, workers=order, label="start/copied")
        if order[0] == session.worker and not session.coordinator.propose(record, expected=None):
            raise BambooError(f"job {session.identity.job} has an epoch already; give this job another name (--job)")
        agree(None, links=engine.links, me=session.worker, workers=order, label="start/proposed")
        engine.links.drain()
    except PeerLostError as error:
        raise BambooError(f"a worker was lost before training began: {error}") from error
    return record


def copy_shadows(
    engine: BambooPipelineEngine, placement: Placement, *, shadows: Mapping[Coordinate, WorkerId], label: str
) -> None:
    """Build the replicas in ``shadows`` that are for this worker, and move state from owners to holders."""
    host, me = engine.host, engine.session.worker
    host.save()
    for coordinate, holder in shadows.items():
        if holder == me:
            host.shadows[coordinate] = host.build(coordinate, process_rank=engine.global_rank)
    host.save()
    for coordinate, holder in shadows.items():
        if placement.owner(coordinate) == me:
            send_replica(engine, coordinate, to=holder, label=label)
    for coordinate, holder in shadows.items():
        if holder == me:
            receive_replica(engine, coordinate, source=placement.owner(coordinate), label=label)


def send_replica(engine: BambooPipelineEngine, coordinate: Coordinate, *, to: WorkerId, label: str) -> None:
    """Send the state of ``coordinate``, which this worker owns; it must not change before the next agreement."""
    packed = pack_state(engine.host.owned[coordinate])
    data = (packed.structure, checksum(packed.tensors))
    engine.links.send(to, Message(f"{label}/state/{coordinate}", data, packed.tensors))


def receive_replica(engine: BambooPipelineEngine, coordinate: Coordinate, *, source: WorkerId, label: str) -> None:
    """Bring this worker's shadow of ``coordinate`` to the state that its owner sends.

    Raises ShadowError when what arrives is not what was sent, and what interrupts the wait.
    """
    message = engine.links.receive(source, f"{label}/state/{coordinate}")
    structure, expected = message.data
    arrived = checksum(message.tensors)
    if arrived != expected:
        raise ShadowError(
            f"the state of {coordinate} from worker {source} arrived damaged: checksum {arrived}, sent with {expected}"
            "; suspect the network or the memory of one of the two machines"
        )
    replica = engine.host.shadows[coordinate]
    unpack_state(replica, PackedState(structure, message.tensors))
    replica.complete = True
    _refresh(engine, replica)


def copy_from_other_pipeline(engine: BambooPipelineEngine, coordinate: Coordinate) -> None:
    """Become the owner of ``coordinate``, lost with its shadow, from the same stage of another pipeline here.

    Parameters, optimizer state, scheduler and counters are equal in all pipelines between two steps. Buffers
    that a forward changes (batch statistics) are not: they go on from the other pipeline's.
    """
    host = engine.host
    source = engine.placement.copied_from(coordinate, held=host.owned)
    if source is None:
        raise RuntimeError(f"nothing here to copy {coordinate} from: the placement is wrong")
    replica = host.build(coordinate, process_rank=engine.global_rank)
    host.save()
    unpack_state(replica, pack_state(host.owned[source]))
    replica.complete = True
    host.owned[coordinate] = replica
    _refresh(engine, replica)


def _refresh(engine: BambooPipelineEngine, replica: StageReplica) -> None:
    """The engine shows a replica's attributes while it is active; make it read what was just written."""
    if engine.host.active is replica:
        engine.__dict__.update(replica.attributes)
