"""Where survivors of a fatal loss get a state of before from: each other's memory, or the store (architecture 10)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.restoring import Handover, State, handovers
from deepspeed_bamboo.errors import ShadowError
from deepspeed_bamboo.runtime.comm.all_gather import agree
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.memory_parts import SealedPart
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer, checked_alike
from deepspeed_bamboo.runtime.stock.description import Description
from deepspeed_bamboo.runtime.stock.replica import StageReplica

MEMORY, STORE = "memory", "store"
"""What a source is called in events."""

Damaged = tuple[WorkerId, int, Coordinate]


@dataclass
class Together:
    """Those who bring a state back: they agree beside the sequence of activities. ``attempt``: of this epoch."""

    worker: Worker
    record: EpochRecord
    attempt: int
    _count: int = field(default=0, init=False)

    @property
    def me(self) -> WorkerId:
        """This worker."""
        return self.worker.me

    @property
    def leads(self) -> bool:
        """True on one of them."""
        return self.worker.leads

    def agree(self, value: Any, *, label: str) -> Mapping[WorkerId, Any]:
        """The ``value`` of each. Raises what interrupts the wait."""
        self._count += 1
        label = f"restore/{self.attempt}/{self._count}/{label}"
        return agree(value, links=self.worker.links, me=self.me, workers=self.record.members, label=label)

    def agree_on(self, kind: str, value: Callable[[], Any]) -> Mapping[WorkerId, Any]:
        """As a worker's, of what ``value`` returns on each."""
        return self.agree(value(), label=kind)


class Store(Protocol):
    """The checkpoints in ``checkpoint.dir``, for workers whose engines are there already."""

    @property
    def name(self) -> str:
        """As people call it."""

    @property
    def known(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints that are of this training, as far as this worker knows, in order."""

    def choose(self, together: Together, steps: Collection[int]) -> int | None:
        """The newest of ``steps`` of which all workers can read a whole checkpoint, None where none is; collective."""

    def distrust(self, step: int) -> None:
        """The checkpoint of ``step`` could not be loaded by all: it does not count when others are removed."""

    def load(self, step: int, coordinates: Collection[Coordinate], replica: Callable[..., StageReplica]) -> str:
        """Bring the stages of ``coordinates`` to their state of ``step``.

        ``replica`` returns what is to get it, given the coordinate and a function that returns its description.
        Returns what is wrong if that does not work.
        """


class Stages:
    """The replicas of this worker that get a state."""

    def __init__(self, worker: Worker, transfer: StateTransfer) -> None:
        self._worker = worker
        self._transfer = transfer

    def take_roles(self, together: Together) -> tuple[Coordinate, ...]:
        """Hold what the placement of the epoch says; returns that."""
        worker, placement = self._worker, together.record.placement
        owned, shadows = placement.hosted_by(worker.me), placement.shadowed_by(worker.me)
        worker.host.take_roles(owned=owned, shadows=shadows)
        worker.view.place(placement)
        return (*owned, *shadows)

    def ready(self, coordinate: Coordinate, description: Callable[[], Description]) -> StageReplica:
        """A replica of ``coordinate`` here, made as ``description`` says where there is none."""
        worker, host = self._worker, self._worker.host
        replica = host.owned.get(coordinate) or host.shadows.get(coordinate)
        if replica is None:
            replica = checked_alike(coordinate, *self._transfer.build_alike(coordinate, description()))
        kind = host.owned if worker.placement.owner(coordinate) == worker.me else host.shadows
        kind[coordinate] = replica
        host.save()
        replica.finish_step()
        return replica

    def finish(self) -> None:
        """All have their state: begin with them."""
        worker = self._worker
        for replica in worker.host.replicas():
            worker.host.restart(replica, micro_batches=worker.micro_batches)
        worker.host.activate_shown()


class FromMemory:
    """Copies that survivors keep of each other's stages."""

    def __init__(self, worker: Worker, *, memory: MemoryRounds, stages: Stages, transfer: StateTransfer) -> None:
        self._worker = worker
        self._memory = memory
        self._stages = stages
        self._transfer = transfer

    def bring(self, state: State, together: Together) -> tuple[set[Damaged], str]:
        """Get the copies that this worker needs, and make its stages what they say.

        Returns which are damaged, and what is wrong if stages can't be made here, as for lack of memory.
        """
        me, parts = self._worker.me, self._memory.parts
        placement = together.record.placement
        keepers = self._memory.keepers(placement, together.record)
        damaged = self._exchange(handovers(state, placement, keepers), state.step, attempt=together.attempt)
        hosted = (*placement.hosted_by(me), *placement.shadowed_by(me))
        # What this worker only keeps is looked at, too: the next loss may leave no other copy.
        for coordinate in dict.fromkeys((*hosted, *(c for c, workers in keepers.items() if me in workers))):
            sealed = parts.get(state.step, coordinate)
            if me in state.holders[coordinate] and (sealed is None or not sealed.is_of(state.step, coordinate)):
                parts.remove(state.step, coordinate)
                damaged.add((me, state.step, coordinate))
        if damaged:
            return damaged, ""
        try:
            self._load(state.step, self._stages.take_roles(together))
        except (RuntimeError, MemoryError, ShadowError) as error:
            return set(), f"{type(error).__name__}: {error}"
        return set(), ""

    def _exchange(self, moves: Collection[Handover], step: int, *, attempt: int) -> set[Damaged]:
        links, me, parts = self._worker.links, self._worker.me, self._memory.parts
        partners = {m.destination for m in moves if m.source == me} | {m.source for m in moves if m.destination == me}
        links.meet(partners)
        for move in moves:
            if move.source == me:
                sealed = parts.get(step, move.coordinate)
                plain, tensors = (None, []) if sealed is None else (sealed.to_plain(), sealed.part.tensors)
                key = f"restore/{attempt}/{step}/{move.coordinate}"
                links.send(move.destination, Message(key, plain, tensors))
        damaged: set[Damaged] = set()
        for move in moves:
            if move.destination == me:
                message = links.receive(move.source, f"restore/{attempt}/{step}/{move.coordinate}")
                tensors = [tensor.to("cpu") for tensor in message.tensors]
                arrived = None if message.data is None else SealedPart.from_plain(message.data, tensors)
                if arrived is None or not arrived.is_of(step, move.coordinate):
                    damaged.add((move.source, step, move.coordinate))
                else:
                    parts.put(arrived)
        return damaged

    def _load(self, step: int, coordinates: Collection[Coordinate]) -> None:
        for coordinate in coordinates:
            sealed = self._memory.parts.get(step, coordinate)
            if sealed is not None:
                packed, description = sealed.part.state()
                replica = self._stages.ready(coordinate, lambda its=description: its)  # type: ignore[misc]
                self._transfer.complete_replica(replica, packed)
        self._stages.finish()


class FromStore:
    """Files that all survivors can read."""

    def __init__(self, *, store: Store, stages: Stages) -> None:
        self._store = store
        self._stages = stages

    def bring(self, step: int, together: Together) -> str:
        """Make this worker's stages what they were after ``step`` steps; returns what is wrong if that fails."""
        problem = self._store.load(step, self._stages.take_roles(together), self._stages.ready)
        if not problem:
            self._stages.finish()
        return problem
