"""Passes that are launched before the host has seen their input arrive, and taken back when it never will.

The host needs much of a forward's time on the device to launch it. A launch that waits for the input loses that time.
So the host launches the passes that consume one received message at once, behind the receive, and waits for the message
afterwards: before it launches anything that others could see (the next send) or that can't be taken back (adding
gradients to their sums), and before it does anything else. If the message never comes, this worker undoes what has
happened to its state since, as if it had been interrupted in the receive (architecture 5, valid data only).

What a layer keeps in Python is not undone: a layer that counts its forwards counts those too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.errors import ExpelledError, JobFailedError
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.nccl import Arrival
from deepspeed_bamboo.runtime.iteration.pass_engine import PassEngine
from deepspeed_bamboo.runtime.iteration.recompute import BufferState, RunningTotals, restore_state, state_before
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.script_state import ScriptState, restore_script_state, script_state

# A pass is launched in some ten milliseconds. One that takes this long after an interruption waits for the device,
# because the model asks for a value, or the queue of launches is full.
_LAUNCH_SECONDS = 0.25


@dataclass
class _Unit:
    """One message that was not seen complete yet, and what has been launched from it."""

    replica: StageReplica
    micro_batch: int
    arrival: Arrival
    receive: Op
    progress: CoordinateProgress  # before the receive
    script: ScriptState  # then
    totals: tuple[Any, Any, list[Any]] | None = None  # before the forward, once that is launched
    went_backward: bool = False


class Deferral:
    """The one message that this worker uses before it has seen it. Where there are no lanes there is never one.

    Args:
        engine: whose passes are launched.
        host: the replicas.
        interruption: ends waits.
    """

    def __init__(self, engine: PassEngine, *, host: StageHost, interruption: Interruption) -> None:
        self._engine = engine
        self._host = host
        self._interruption = interruption
        self._unit: _Unit | None = None
        self._launching: Arrival | None = None
        self._launched = threading.Event()
        interruption.on_interruption(self._give_up_if_stuck)

    def allows(self, replica: StageReplica) -> bool:
        """True if what ``replica`` receives now may be used before it was seen.

        Not in the rest of an interrupted iteration: what is done again there is measured, and seldom.
        """
        owned = self._host.owned.get(replica.coordinate) is replica
        return owned and torch.is_grad_enabled() and not self._engine.failover.recovering

    def begin(self, replica: StageReplica, micro_batch: int, *, receive: Op, arrival: Arrival) -> None:
        """``receive`` of ``micro_batch`` is posted, and nothing else has been done about it."""
        self._unit = _Unit(replica, micro_batch, arrival, receive, replica.progress, script_state(replica))

    def covers(self, instruction: Instruction, replica: StageReplica) -> bool:
        """True for a pass that consumes the message (or what was computed from it), and can be undone."""
        unit = self._unit
        if unit is None or unit.replica is not replica or unit.micro_batch != instruction.micro_batch:
            return False
        if instruction.op is Op.FNC:
            return unit.receive is Op.RECV_ACTIVATION
        return instruction.op is Op.BNC and self._host.gradient_updates.covers(replica.attributes["optimizer"])

    def holds(self, replica: StageReplica, micro_batch: int) -> bool:
        """True if ``micro_batch`` may have to be done again, so that what it needs must stay."""
        return self._unit is not None and (self._unit.replica, self._unit.micro_batch) == (replica, micro_batch)

    @contextmanager
    def launching(self, instruction: Instruction) -> Iterator[None]:
        """Around a pass that is covered. Raises what interrupts a wait, before or after."""
        unit = self._unit
        if unit is None:
            yield
            return
        self._launched.clear()
        self._launching = unit.arrival
        try:
            # What was announced before this moment did not find us here.
            self._interruption.check()
            if instruction.op is Op.FNC:
                unit.totals = _totals(self._engine)
            else:
                unit.went_backward = True
            yield
        finally:
            self._launching = None
            self._launched.set()

    def confirm(self) -> None:
        """Wait until the message was seen: what was launched from it counts. Raises what interrupts the wait."""
        unit = self._unit
        if unit is None:
            return
        unit.arrival.confirm(self._interruption)
        self._unit = None
        if unit.went_backward:
            self._host.drop_micro_batch(unit.replica, unit.micro_batch)

    def end(self, error: BaseException) -> None:
        """The passes were left with ``error``: take back what was not seen. Raises the interruption that caused it.

        Code of the model's may fail on what is no data; that is no error of the model's.
        """
        unit = self._unit
        try:
            if unit is not None and isinstance(error, Exception) and not isinstance(error, _INTERRUPTIONS):
                unit.arrival.confirm(self._interruption)
        finally:
            self._take_back()

    def note_buffers(self, replica: StageReplica, micro_batch: int) -> None:
        """Before a forward: a backward that is taken back has to repeat it, on the same buffers."""
        if not torch.is_grad_enabled() or (self._engine.device.type == "cpu" and not self.on_host):
            return
        previous = next(reversed(replica.buffers_before.values()), None)
        replica.buffers_before[micro_batch] = state_before(replica, previous=previous)

    # For tests: there are no lanes on a CPU.
    on_host = False

    def _take_back(self) -> None:
        unit, self._unit = self._unit, None
        if unit is None:
            return
        replica, micro_batch = unit.replica, unit.micro_batch
        self._host.activate(replica)
        buffers = self._engine.pipe_buffers
        replica.progress = unit.progress
        if unit.went_backward:
            self._host.gradient_updates.drop(replica.module)
            restore_script_state(unit.script, replica)
            replica.retained_gradients.pop(micro_batch, None)
            self._engine.grad_layer = None
        if unit.receive is Op.RECV_GRAD:
            replica.received_gradients.pop(micro_batch, None)
            if unit.went_backward:
                _forget_gradients(buffers["inputs"][micro_batch])
                replica.without_graph[micro_batch] = replica.buffers_before[micro_batch]
            return
        buffers["inputs"][micro_batch] = None
        if unit.totals is not None:
            self._take_back_forward(replica, micro_batch, unit.totals)

    def _take_back_forward(self, replica: StageReplica, micro_batch: int, totals: tuple[Any, Any, list[Any]]) -> None:
        engine = self._engine
        engine.pipe_buffers["outputs"][micro_batch] = None
        engine.total_loss, engine.total_additional_losses, engine.fwd_outputs = totals
        replica.retained_outputs.pop(micro_batch, None)
        replica.losses.pop(micro_batch, None)
        before: BufferState | None = replica.buffers_before.get(micro_batch)
        if before is not None:
            restore_state(before, replica)

    def _give_up_if_stuck(self) -> None:
        """An interruption was announced. If the main thread waits for the device in a pass, nothing else frees it."""
        arrival = self._launching
        if arrival is None:
            return

        def give_up() -> None:
            self._launched.wait(_LAUNCH_SECONDS)
            if self._launching is arrival:
                arrival.abort()

        threading.Thread(target=give_up, name="bamboo-give-up", daemon=True).start()


_INTERRUPTIONS = (EpochChangedError, PeerLostError, JobFailedError, ExpelledError)


def _totals(engine: RunningTotals) -> tuple[Any, Any, list[Any]]:
    """Copies of what stock adds a micro-batch's loss to, in place."""
    return _copied(engine.total_loss), _copied(engine.total_additional_losses), list(engine.fwd_outputs)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)((name, _copied(item)) for name, item in value.items())
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _forget_gradients(inputs: Any) -> None:
    for tensor in [inputs] if isinstance(inputs, torch.Tensor) else inputs:
        tensor.grad = None
