"""Rebuilds the shadows that a loss has removed while the interrupted iteration continues (architecture 5, point 6).

State is constant up to the step. So when work continues, the owner of an unprotected coordinate sends its state to
the new holder, in a thread and over channels of their own. When the iteration's gradients are mirrored, the holder
has what every other shadow has at that moment. It says so in the agreement of the iteration, and from then on
everybody counts it as a shadow: it takes the step with all others.

A copy that is late is given up, and made at the iteration boundary (``redundancy_repair.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.errors import ExpelledError
from deepspeed_bamboo.runtime.comm.channel import Message, Meter
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.stage_state import PackedState, checksum, pack_state
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer, checked_alike
from deepspeed_bamboo.runtime.stock.replica import StageReplica

REBUILT = "rebuilt"
"""The name under which a holder reports what it has rebuilt: the epoch, and coordinates."""

_PIECE_BYTES = 32 * 2**20
_WORTH_WAITING_FOR = 0.5


@dataclass
class _Arriving:
    """The state of one coordinate on its way to this worker."""

    source: WorkerId
    structure: Any = None
    description: Any = None
    total_bytes: int = 0
    arrived_bytes: int = 0
    tensors: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False

    @property
    def share(self) -> float:
        """How much of it has arrived, 0 to 1."""
        return self.arrived_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass
class _Work:
    """What this worker has to do for the missing shadows of one epoch."""

    record: EpochRecord
    target: Placement
    links: Links
    interruption: Interruption
    ready: Any  # the CUDA event after which what is sent may be read
    sending: list[tuple[Coordinate, WorkerId, PackedState]]
    descriptions: dict[Coordinate, Any]
    arriving: dict[Coordinate, _Arriving]
    built: dict[Coordinate, StageReplica] = field(default_factory=dict)
    rebuilt: list[Coordinate] = field(default_factory=list)
    prepared: bool = False
    stopped: bool = False
    started_seconds: float = field(default_factory=time.perf_counter)
    waited_seconds: float = 0.0

    @property
    def partners(self) -> set[WorkerId]:
        """The workers that state goes to or comes from."""
        return {holder for _, holder, _ in self.sending} | {state.source for state in self.arriving.values()}


class ShadowRebuild:
    """One worker's part of it. All methods are called in the main thread.

    Args:
        worker: whose ``placement`` lacks shadows.
        transfer: builds replicas and completes them.
    """

    def __init__(self, worker: Worker, *, transfer: StateTransfer) -> None:
        self._worker = worker
        self._transfer = transfer
        self._work: _Work | None = None

    def begin(self) -> None:
        """At the start of an iteration, or of what is left of one: send and receive what is missing, once an epoch."""
        worker = self._worker
        if not worker.view.entered or not worker.protects or self._work is not None:
            return
        record = worker.record
        target = worker.protected(record.members)
        if target == worker.placement:
            return
        self._work = self._planned(record, target)
        if self._work.partners:
            threading.Thread(target=self._exchange, args=(self._work,), name="bamboo-rebuilding", daemon=True).start()
        for replica in worker.host.owners():
            worker.strike_if_scripted(replica.coordinate, "protect")

    def _planned(self, record: EpochRecord, target: Placement) -> _Work:
        worker, me = self._worker, self._worker.me
        missing = target.shadows_beyond(worker.placement)
        worker.host.save()
        interruption = Interruption()
        interruption.enter(record)
        sending = [
            (coordinate, holder, pack_state(worker.host.owned[coordinate]))
            for coordinate, holder in missing
            if target.owner(coordinate) == me
        ]
        return _Work(
            record=record,
            target=target,
            links=worker.links.beside(interruption, name="state"),
            interruption=interruption,
            # After the copies that packing makes, which the other stream reads.
            ready=torch.cuda.current_stream().record_event() if worker.device.type == "cuda" else None,
            sending=sending,
            descriptions={
                coordinate: worker.host.description(worker.host.owned[coordinate])
                for coordinate, _ in missing
                if target.owner(coordinate) == me
            },
            arriving={c: _Arriving(target.owner(c)) for c, holder in missing if holder == me},
        )

    def takes_part(self) -> bool:
        """True on a worker that will hold one of the missing shadows."""
        return self._work is not None and bool(self._work.arriving)

    def prepare(self) -> None:
        """When this worker's passes are done: build the replicas, and channels for their gradients. Raises what
        interrupts that."""
        worker, work = self._worker, self._work
        if work is None or work.prepared:
            return
        if work.partners:
            worker.links.connect(sorted(work.partners), with_lanes=work.partners)
        for coordinate, state in work.arriving.items():
            worker.session.interruption.wait_until(partial(_is_described, state, work))
            if state.description is None:
                continue
            replica = checked_alike(coordinate, *self._transfer.build_alike(coordinate, state.description))
            worker.host.restart(replica, micro_batches=worker.micro_batches)
            work.built[coordinate] = replica
        worker.host.activate_shown()
        work.prepared = True

    def mirrored(self, placement: Placement) -> Placement:
        """``placement`` with the shadows that are being rebuilt, which get mirrored gradients already."""
        return placement if self._work is None else self._work.target

    def finish(self) -> None:
        """Before gradients are mirrored: make shadows of what has arrived. Raises what interrupts the wait."""
        worker, work = self._worker, self._work
        if work is None:
            return
        started = time.perf_counter()
        for coordinate, state in work.arriving.items():
            if coordinate not in work.built or not self._await(work, state):
                logger.warning(
                    f"{worker.me}: {state.share:.0%} of the new shadow of {coordinate} was there when the "
                    "iteration ended; it is copied before the next one"
                )
                continue
            replica = work.built.pop(coordinate)
            self._transfer.complete_replica(replica, PackedState(state.structure, state.tensors))
            state.tensors = []
            worker.host.shadows[coordinate] = replica
            work.rebuilt.append(coordinate)
        work.waited_seconds = time.perf_counter() - started

    def _await(self, work: _Work, state: _Arriving) -> bool:
        """Whether the state is there. Where copying it again would not be faster, what is missing is waited for."""
        patient = self._worker.device.type == "cpu" or state.share >= _WORTH_WAITING_FOR
        if patient:
            self._worker.session.interruption.wait_until(lambda: state.complete or work.stopped)
        return state.complete

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of the iteration."""
        work = self._work
        return {REBUILT: (work.record.number, tuple(work.rebuilt))} if work is not None and work.rebuilt else {}

    def end(self) -> tuple[float, float] | None:
        """The iteration is over, or the epoch: the thread's waits end. Returns seconds since this began, and waited
        for; None if nothing was to be rebuilt."""
        work, self._work = self._work, None
        if work is None:
            return None
        work.interruption.announce_expulsion()
        work.links.close()
        return time.perf_counter() - work.started_seconds, work.waited_seconds

    # ---- in a thread of its own -----------------------------------------------------------------------

    def _exchange(self, work: _Work) -> None:
        session, me = self._worker.session, self._worker.me
        interruption = session.interruption
        try:
            work.links.connect(work.partners)
            for coordinate, holder, packed in work.sending:
                _send(work, coordinate, holder, packed, device=self._worker.device)
            for coordinate, state in work.arriving.items():
                with self._worker.session.works.watch(
                    f"new shadow of {coordinate} from worker {state.source}"
                ) as meter:
                    _receive(work, coordinate, state, meter=meter)
                interruption.notify()
        except ExpelledError:
            work.links.close()  # the main thread has given it up
        except (PeerLostError, RuntimeError, ValueError, MemoryError) as error:
            # The iteration continues, and what is missing is copied at its end, where errors count.
            work.links.close()  # so that the others do not wait
            logger.warning(f"{me}: new shadows can't be copied beside the iteration ({error})")
        except BaseException:
            work.links.close()
            raise
        finally:
            work.stopped = True
            interruption.notify()


def _is_described(state: _Arriving, work: _Work) -> bool:
    return state.description is not None or work.stopped


def with_rebuilt(placement: Placement, agreed: Round, *, epoch: int) -> Placement:
    """``placement`` with the shadows that ``agreed`` says were rebuilt in ``epoch``."""
    present = placement.all_copies()
    shadows = [
        (coordinate, worker)
        for worker, value in agreed.items()
        for coordinate in _rebuilt_in(value, epoch=epoch)
        if len(present[coordinate]) <= placement.copies and worker not in present[coordinate]
    ]
    return placement.with_shadows(shadows) if shadows else placement


def _rebuilt_in(value: Mapping[str, Any], *, epoch: int) -> Sequence[Coordinate]:
    number, coordinates = value.get(REBUILT, (-1, ()))
    return coordinates if number == epoch else ()


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, some together, so that no piece of several is large."""
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece


def _send(work: _Work, coordinate: Coordinate, holder: WorkerId, packed: PackedState, *, device: torch.device) -> None:
    pieces = list(_pieces(packed.tensors))
    total_bytes = sum(tensor.nbytes for tensor in packed.tensors)
    header = (packed.structure, total_bytes, len(pieces), work.descriptions[coordinate])
    work.links.send(holder, Message(f"state/{coordinate}", header))
    for index, piece in enumerate(pieces):
        work.interruption.check()
        copies = _on_host(piece, device=device, ready=work.ready)
        work.links.send(holder, Message(f"state/{coordinate}/{index}", checksum(copies), copies))


def _on_host(tensors: Sequence[torch.Tensor], *, device: torch.device, ready: Any) -> list[torch.Tensor]:
    """Copies in host memory, made beside what the main thread's stream does."""
    if device.type != "cuda":
        return list(tensors)
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        return [tensor.to("cpu") for tensor in tensors]


def _receive(work: _Work, coordinate: Coordinate, state: _Arriving, *, meter: Meter) -> None:
    header = work.links.receive(state.source, f"state/{coordinate}").data
    state.structure, state.total_bytes, pieces, state.description = header
    meter.expect(state.total_bytes)
    work.interruption.notify()
    for index in range(pieces):
        message = work.links.receive(state.source, f"state/{coordinate}/{index}")
        arrived = checksum(message.tensors)
        if arrived != message.data:
            raise PeerLostError(state.source, f"state of {coordinate} arrived damaged: {arrived}, not {message.data}")
        state.tensors.extend(message.tensors)
        size = sum(tensor.nbytes for tensor in message.tensors)
        state.arrived_bytes += size
        meter.add(size)
    state.complete = True
