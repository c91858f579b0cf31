"""Sends the state of stages from their owners to the workers that will shadow or own them (architecture 5, point 6)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.replica_differences import differences, without_attributes
from deepspeed_bamboo.errors import ShadowError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.recovery.stage_state import PackedState, checksum, pack_state, unpack_state
from deepspeed_bamboo.runtime.stock.description import Description
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Copies = Sequence[tuple[Coordinate, WorkerId]]
"""Coordinates, and who is to hold a copy: of one coordinate several workers may."""


def checked_alike(coordinate: Coordinate, replica: StageReplica | None, found: tuple[str, ...]) -> StageReplica:
    """``replica``. Raises ShadowError where it is not what its owner is."""
    if replica is None or found:
        raise _unlike(f"a replica of {coordinate}", found)
    return replica


def check_copied(problems: Iterable[str]) -> None:
    """Raise ShadowError where :meth:`StateTransfer.copy_shadows` has found ``problems``, on whichever workers."""
    found = tuple(sorted(set(problems)))
    if found:
        raise _unlike("a shadow", found)


def _unlike(what: str, found: tuple[str, ...]) -> ShadowError:
    return ShadowError(
        f"{what} has to be made on another worker than at the start, and can't be made there as its owner is: "
        f"{'; '.join(found)}. Do what makes the difference in the layer's own constructor (its LayerSpec), or to "
        "layers of every stage alike: a worker makes such a layer like one of its own stages. With checkpoint.dir the "
        "same command continues from the last checkpoint"
    )


class StateTransfer:
    """One worker's side of every transfer of state.

    Args:
        worker: whose stages these are.
        written: called with a replica that got its state, which is not what the script wrote here.
        process_rank: returns the rank that this process has now.
    """

    def __init__(
        self, worker: Worker, *, written: Callable[[StageReplica], None], process_rank: Callable[[], int]
    ) -> None:
        self._worker = worker
        self._written = written
        self._process_rank = process_rank

    def copy_shadows(
        self, placement: Placement, *, shadows: Copies, label: str, attributes: bool = False
    ) -> tuple[str, ...]:
        """Build the replicas in ``shadows`` that are for this worker, and move state from owners to holders.

        Returns in what the replicas made here are not what their owners are; their state is not taken then.
        ``attributes``: those of layers and parameters count, too: no forward has changed any yet.
        """
        host, me = self._worker.host, self._worker.me
        host.save()
        for coordinate, holder in shadows:
            if placement.owner(coordinate) == me:
                self.send_description(coordinate, to=holder, label=label)
        problems: list[str] = []
        unlike: set[Coordinate] = set()
        for coordinate, holder in shadows:
            if holder == me:
                source = placement.owner(coordinate)
                replica, found = self.build_described(coordinate, source=source, label=label, attributes=attributes)
                if replica is not None:
                    host.shadows[coordinate] = replica
                unlike.update([coordinate] if found else ())
                problems += [f"{coordinate} (of {source}, its shadow on {me}): {text}" for text in found]
        self._hand_over(placement, shadows=shadows, label=label, unlike=unlike)
        return tuple(problems)

    def send_description(self, coordinate: Coordinate, *, to: WorkerId, label: str) -> None:
        """Say what ``coordinate``, which this worker owns, is, to a worker that will hold a replica of it."""
        described = self._worker.host.description(self._worker.host.owned[coordinate])
        self._worker.links.send(to, Message(f"{label}/description/{coordinate}", described))

    def build_described(
        self, coordinate: Coordinate, *, source: WorkerId, label: str, attributes: bool = False
    ) -> tuple[StageReplica | None, tuple[str, ...]]:
        """Build a replica of ``coordinate`` as its owner describes it; and in what it differs.

        Raises what interrupts the wait.
        """
        described = self._worker.links.receive(source, f"{label}/description/{coordinate}").data
        return self.build_alike(coordinate, described, attributes=attributes)

    def take_described(self, coordinate: Coordinate, *, source: WorkerId, label: str) -> StageReplica:
        """As :meth:`build_described`. Raises ShadowError where it is not alike; the job's start has excluded that."""
        replica, found = self.build_described(coordinate, source=source, label=label)
        return checked_alike(coordinate, replica, found)

    def build_alike(
        self, coordinate: Coordinate, described: Description, *, attributes: bool = False
    ) -> tuple[StageReplica | None, tuple[str, ...]]:
        """Build a replica of ``coordinate`` that is as ``described``; and in what it differs; None if there is none.

        Attributes of layers are given values that can be sent. Others count only if ``attributes`` says so: what a
        forward has noted (an output, a cache) the replica's forwards note again.
        """
        try:
            with self._worker.session.works.watch(f"building {coordinate}"):
                replica = self._worker.host.build(coordinate, process_rank=self._process_rank(), description=described)
        except KeyError as error:  # the text of which is a key, and says nothing by itself
            return None, (f"making it fails where {error} is looked up",)
        except LookupError as error:
            return None, (str(error),)
        made = self._worker.host.description(replica)
        if not attributes:
            described, made = without_attributes(described), without_attributes(made)
        return replica, differences(described, made)

    def _hand_over(
        self,
        placement: Placement,
        *,
        shadows: Copies,
        label: str,
        unlike: Container[Coordinate] = (),
    ) -> None:
        """Move state from owners to the replicas in ``shadows`` that their holders have; not to ``unlike`` ones."""
        me = self._worker.me
        self._worker.host.save()
        for coordinate, holder in shadows:
            if placement.owner(coordinate) == me:
                self.send_replica(coordinate, to=holder, label=label)
        for coordinate, holder in shadows:
            if holder == me and coordinate not in unlike:
                self.receive_replica(coordinate, source=placement.owner(coordinate), label=label)

    def send_replica(self, coordinate: Coordinate, *, to: WorkerId, label: str) -> None:
        """Send the state of ``coordinate``, which this worker owns; it must not change before the next agreement."""
        packed = pack_state(self._worker.host.owned[coordinate]).on(self._worker.device)
        data = (packed.structure, checksum(packed.tensors))
        self._worker.links.send(to, Message(f"{label}/state/{coordinate}", data, packed.tensors))

    def receive_replica(self, coordinate: Coordinate, *, source: WorkerId, label: str) -> None:
        """Bring this worker's shadow of ``coordinate`` to the state that its owner sends.

        Raises ShadowError when what arrives is not what was sent, and what interrupts the wait.
        """
        with self._worker.session.works.watch(f"state of {coordinate} from worker {source}") as work:
            message = self._worker.links.receive(source, f"{label}/state/{coordinate}", meter=work)
        structure, expected = message.data
        arrived = checksum(message.tensors)
        if arrived != expected:
            raise ShadowError(
                f"the state of {coordinate} from worker {source} arrived damaged: checksum {arrived}, sent with "
                f"{expected}; suspect the network or the memory of one of the two machines"
            )
        self.complete_replica(self._worker.host.shadows[coordinate], PackedState(structure, message.tensors))

    def refresh_shadows(self, *, label: str, leaving_out: Container[Coordinate] = ()) -> None:
        """Bring every shadow to its owner's state, which has changed otherwise than by a step; collective.

        ``leaving_out``: not of these, the same on all workers.

        Raises what interrupts the wait; then it is for the caller to do it again before the next agreement.
        """
        for shadow in self._worker.host.shadows.values():
            shadow.finish_step()
        shadows = [(c, holder) for c, holder in self._worker.placement.all_shadows if c not in leaving_out]
        self._hand_over(self._worker.placement, shadows=shadows, label=label)

    def copy_from_other_pipeline(self, coordinate: Coordinate) -> None:
        """Become the owner of ``coordinate``, lost with its shadow, from the same stage of another pipeline here.

        Parameters, optimizer state, scheduler and counters are equal in all pipelines between two steps. Buffers
        that a forward changes (batch statistics) are not: they go on from the other pipeline's.
        """
        host = self._worker.host
        source = self._worker.placement.copied_from(coordinate, held=host.owned)
        if source is None:
            raise RuntimeError(f"nothing here to copy {coordinate} from: the placement is wrong")
        described = host.description(host.owned[source])
        replica = host.build(coordinate, process_rank=self._process_rank(), description=described)
        host.save()
        self.complete_replica(replica, pack_state(host.owned[source]))
        host.owned[coordinate] = replica
        if host.owned[source].moves_beside_weights():
            tell(
                self._worker,
                f"{coordinate} continues as a copy of {source}, for nobody else had its state: buffers and attributes "
                "of layers that forwards change (batch statistics, codebooks, counts) are those of that pipeline from "
                "now on, so results may differ from those without a loss",
            )

    def leave_to_script(self) -> None:
        """Where the script holds the objects of what is a shadow now, make another replica; the script's are free then.

        Where that can't be made alike, the shadow stays what it is.
        """
        host = self._worker.host
        for coordinate, shadow in list(host.shadows.items()):
            if not shadow.held_by_script:
                continue
            another, found = self.build_alike(coordinate, host.description(shadow))
            if another is not None and not found:
                host.save()
                self.complete_replica(another, pack_state(shadow))
                host.shadows[coordinate] = another

    def complete_replica(self, replica: StageReplica, packed: PackedState) -> None:
        """Bring ``replica`` to the state ``packed``. From then on it may stand for its stage."""
        unpack_state(replica, packed)
        self.completed(replica)

    def completed(self, replica: StageReplica) -> None:
        """``replica`` has got its state."""
        replica.complete = True
        # Before anything saves what the engine shows, which would put what was there before in the new state's place.
        self._worker.host.show_again(replica)
        self._written(replica)
