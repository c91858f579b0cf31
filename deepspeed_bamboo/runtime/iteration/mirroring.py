"""The second part of an iteration's end: owners send reduced gradients to their shadows, which take the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.iteration.messages import IterationContext
from deepspeed_bamboo.runtime.iteration.step_calls import StepCalls
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.shadow_steps import ShadowSteps
from deepspeed_bamboo.runtime.stock.sparse_gradients import REMEDY, has_sparse
from deepspeed_bamboo.runtime.stock.stock_steps import StockSteps


class ShadowsToCome(Protocol):
    """The shadows that are being rebuilt beside this iteration."""

    def mirrored(self, placement: Placement) -> Placement:
        """``placement`` with them."""

    def finish(self) -> None:
        """Make shadows of those that have arrived. Raises what interrupts the wait."""


class Mirroring:
    """One worker's part of it.

    Args:
        worker: whose stages.
        stock: reads and writes gradients.
        steps: this iteration's, which begin beside the sending.
        shadow_steps: the stream beside which shadows take theirs.
        to_come: shadows that are being rebuilt.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        stock: StockSteps,
        steps: StepCalls,
        shadow_steps: ShadowSteps,
        to_come: Callable[[], ShadowsToCome],
    ) -> None:
        self._worker = worker
        self._stock = stock
        self._steps = steps
        self._shadow_steps = shadow_steps
        self._to_come = to_come
        # Of which stages' steps the first part has run on this device before: what it launches is loaded.
        self._launched: set[Coordinate] = set()
        # Mirrored gradients that have arrived and are still to be put in their place.
        self._arrived: list[tuple[StageReplica, Message]] = []

    def mirror(self, context: IterationContext, *, meanwhile: Callable[[], None]) -> None:
        """Send and receive. Raises what interrupts a wait.

        ``meanwhile`` is called while others' gradients are on their way, where the device can send while it computes.
        """
        host, to_come = self._worker.host, self._to_come()
        placement = to_come.mirrored(context.placement)
        to_come.finish()
        # Their part of the gradients' norm comes before others' gradients have arrived.
        early = {c for c, shadow in host.shadows.items() if self._shadow_steps.can_wait(shadow)}
        # The first time it is also before anything is sent: a kernel's first launch may wait for the device to be idle,
        # which a send is not until it is received. After that the device sends while these launch.
        sends_first = self._shadow_steps.active and self._launched.issuperset(host.owned)
        if not sends_first:
            self._steps.start(early.union(host.owned))
            self._launched.update(host.owned)
        self._send(placement, context)
        if sends_first:
            self._steps.start(host.owned)
        messages = self._receive(placement, context, started=sends_first)
        if sends_first:
            # While others' gradients are on their way.
            self._steps.start_in_time(early)
            meanwhile()
        self._note_arrived(messages)
        if not sends_first:
            self.accept_arrived()

    def accept_arrived(self) -> None:
        """Put the gradients that others have mirrored where the shadows' steps will look for them."""
        host = self._worker.host
        if not self._arrived:
            return
        for replica, message in self._arrived:
            replica.finish_step()
            host.activate(replica)
            self._stock.accept(replica, message.data, message.tensors)
        self._arrived.clear()
        host.save()

    def forget(self) -> None:
        """Drop what has arrived."""
        self._arrived.clear()

    def _send(self, placement: Placement, context: IterationContext) -> None:
        host = self._worker.host
        for replica in host.owners():
            holders = placement.copies_of(replica.coordinate)[1:]
            if not holders:
                continue
            host.activate(replica)
            data, tensors = self._stock.mirrored(replica)
            if has_sparse(tensors):
                raise ConfigError(
                    f"stage {replica.coordinate} (pipeline.stage) has sparse gradients, which can't be sent to its "
                    f"shadow. Find the layer that calls an embedding with sparse=True; {REMEDY}"
                )
            for holder in holders:
                key = f"{context.activity}/mirror/{replica.coordinate}"
                self._worker.links.send(holder, Message(key, data, tensors))

    def _receive(self, placement: Placement, context: IterationContext, *, started: bool) -> dict[Coordinate, Message]:
        return {
            c: self._worker.links.receive(placement.owner(c), f"{context.activity}/mirror/{c}", started=started)
            for c in placement.shadowed_by(self._worker.me)
        }

    def _note_arrived(self, messages: Mapping[Coordinate, Message]) -> None:
        worker = self._worker
        for coordinate, message in messages.items():
            if message.arrival is not None:
                message.tensors = message.arrival.wait(worker.session.interruption)
            if coordinate in worker.host.shadows:  # else its state has not come in time
                self._arrived.append((worker.host.shadows[coordinate], message))
