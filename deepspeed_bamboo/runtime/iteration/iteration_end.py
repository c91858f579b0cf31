"""The end of an iteration: reduce, mirror to the shadows, agree, step (architecture 5, commit rule).

Before the agreement everything can be undone: gradients are put back to what they were before the
reduction. After it every worker steps, whatever happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.iteration.executor import IterationContext
from deepspeed_bamboo.runtime.iteration.losses import stage_losses
from deepspeed_bamboo.runtime.stock.collectives import CallSet, Contribution, answers_from
from deepspeed_bamboo.runtime.stock.exchange import exchange_requests
from deepspeed_bamboo.runtime.stock.gradients import (
    accept_gradients,
    gradient_flags,
    gradient_tensors,
    remember_gradients,
)
from deepspeed_bamboo.runtime.stock.hyperparameters import accept_values, values_of
from deepspeed_bamboo.runtime.stock.partition_gather import gather
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.shadow_steps import LateStep, ShadowSteps
from deepspeed_bamboo.runtime.stock.suspended import SuspendedCall

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


class IterationEnd:
    """Carries out the instructions that a worker has once an iteration, for all that it hosts and shadows."""

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine
        self._running: CallSet | None = None
        self._step_calls: CallSet | None = None
        self._shadow_steps = ShadowSteps(engine.device)
        # What the step's calls have gathered and not been told yet.
        self._gathered: dict[Coordinate, torch.Tensor] = {}
        # Of which stages' steps the first part has run on this device before: what it launches is loaded.
        self._launched: set[Coordinate] = set()
        # What this worker hands in with the agreement, if that is known already, and mirrored gradients that have
        # arrived and are still to be put in their place.
        self._handed_in: dict[str, Any] | None = None
        self._arrived: list[tuple[StageReplica, Message]] = []

    @property
    def is_running(self) -> bool:
        """True while stock code reduces or steps."""
        return self._running is not None

    def current_call(self) -> SuspendedCall | None:
        """The suspended call whose stock code is running right now."""
        return None if self._running is None else self._running.current

    def execute(self, instruction: Instruction, context: IterationContext) -> None:
        """Carry out one of REDUCE_TIED, REDUCE, MIRROR, COMMIT. Raises what interrupts a wait."""
        self._engine.rebuilding.prepare()
        if instruction.op is Op.REDUCE_TIED:
            self._remember_gradients()
            self._reduce(self._engine._exec_reduce_tied_grads, label=f"{context.activity}/tied", context=context)
        elif instruction.op is Op.REDUCE:
            for replica in self._engine.host.owners():
                self._engine.worker.strike_if_scripted(replica.coordinate, "reduce")
            self._reduce(self._engine._exec_reduce_grads, label=f"{context.activity}/reduce", context=context)
        elif instruction.op is Op.MIRROR:
            self._cancel_steps()
            self._mirror(context)
        elif instruction.op is Op.COMMIT:
            self._commit()
        else:
            raise ValueError(f"{instruction} does not belong to the end of an iteration")

    def step(self, context: IterationContext) -> None:
        """After the agreement: every replica takes its step. Continues where an interruption stopped it."""
        engine, activity, calls = self._engine, self._engine.activity, self._step_calls
        if calls is None:
            raise RuntimeError("a step without an agreement")
        engine.protection.count_on_rebuilt(activity.rounds[0])
        self._forget_steps_of_others(calls)
        if activity.delivered == 0:
            for replica in engine.host.owners():
                engine.worker.strike_if_scripted(replica.coordinate, "step")
        self._accept_arrived()
        late = self._may_be_late(calls)
        if activity.delivered == 0:
            # One that was to be late may belong to an owner by now.
            self._start_steps({replica.coordinate for replica in engine.host.replicas()}.difference(late))
        while pending := {c: request for c, request in calls.pending().items() if c not in late}:
            if activity.delivered == len(activity.rounds):
                self._lead_on(calls)
                self._gathered = gather(
                    pending,
                    links=engine.links,
                    placement=engine.placement,
                    me=engine.session.worker,
                    label=f"{activity.index}/{activity.delivered}",
                )
                for coordinate in [c for c in self._gathered if c in engine.host.owned]:
                    engine.worker.strike_if_scripted(coordinate, "gather")
                value = {"contributions": self._contributions(calls)}
                activity.rounds.append(engine.worker.agree(value, among=engine.placement.holders))
            agreed = _contributed(activity.rounds[activity.delivered])
            activity.delivered += 1
            told = {c: request for c, request in pending.items() if c not in self._gathered}
            answers = {**answers_from(told, agreed, device=engine.device), **self._gathered}
            self._gathered = {}
            self._advance(calls, answers, later=late)
        for replica in engine.host.replicas():
            if replica.coordinate in late:
                launch = functools.partial(self._step_late, calls, replica, _contributed(activity.rounds[0]))
                replica.stepping = LateStep(replica, launch)
            elif replica.coordinate in calls.beside:
                self._shadow_steps.finish(replica)
            _apply_buffers(replica)
            replica.micro_offset += context.micro_batches
        engine.script_writes.stepped()
        self._step_calls = None

    def _forget_steps_of_others(self, calls: CallSet) -> None:
        """What was rebuilt in an epoch that ended before everybody counted on it is no shadow."""
        self._running = calls
        try:
            calls.keep({**self._engine.host.owned, **self._engine.host.shadows})
        finally:
            self._running = None

    def launch_late_steps(self) -> None:
        """What :meth:`step` has left for later is launched; called once the next iteration's first result is out."""
        for replica in self._engine.host.shadows.values():
            if isinstance(replica.stepping, LateStep):
                replica.stepping.launch()

    def _may_be_late(self, calls: CallSet) -> set[Coordinate]:
        """The shadows on a worker that begins every iteration. Others wait then anyway, and the device with them."""
        host = self._engine.host
        if not any(coordinate.stage == 0 for coordinate in host.owned):
            return set()
        return {c for c, shadow in host.shadows.items() if c in calls.beside and self._shadow_steps.can_wait(shadow)}

    def _step_late(
        self, calls: CallSet, replica: StageReplica, contributions: Mapping[Coordinate, Contribution]
    ) -> None:
        host, coordinate = self._engine.host, replica.coordinate
        active = host.active
        self._running = calls
        try:
            calls.start({coordinate})
            pending = {coordinate: calls.pending()[coordinate]}
            answer = answers_from(pending, contributions, device=self._engine.device)[coordinate]
            self._shadow_steps.follow(answer)
            calls.finish(coordinate, answer)
        finally:
            self._running = None
        self._shadow_steps.finish(replica)
        if active is not None:
            host.activate(active)

    def abandon(self) -> None:
        """Nobody saw the agreement: back to the gradients before the reduction, as if nothing was suspended."""
        self._cancel_steps()
        for replica in self._engine.host.owners():
            if replica.before_reduction is not None:
                replica.before_reduction()
                replica.before_reduction = None

    def _cancel_steps(self) -> None:
        self._handed_in = None
        self._arrived.clear()
        self._gathered = {}
        if self._step_calls is None:
            return
        self._running = self._step_calls
        try:
            self._step_calls.cancel()
        finally:
            self._running = None
            self._step_calls = None

    def forget(self) -> None:
        """The iteration is over: drop what was kept for undoing it."""
        self._engine.links.drain()
        for replica in self._engine.host.replicas():
            replica.start_iteration()
            self._engine.host.empty_buffers(replica)
        self._engine.host_offload.start_iteration()

    def _remember_gradients(self) -> None:
        host = self._engine.host
        for replica in host.owners():
            host.activate(replica)
            touched: Sequence[torch.Tensor | None] = []
            if self._engine.is_data_parallel:
                touched = gradient_tensors(self._engine.optimizer, self._engine.module)
            elif self._engine.module.tied_comms:
                touched = [
                    weight._hp_grad if self._engine.using_bf16_optimizer else weight.grad
                    for weight, _ in self._engine.module.get_tied_weights_and_groups()
                ]
            replica.before_reduction = remember_gradients(
                self._engine.optimizer,
                self._engine.module,
                touched=[tensor for tensor in touched if tensor is not None],
            )

    def _reduce(self, function: Callable[[], None], *, label: str, context: IterationContext) -> None:
        engine = self._engine
        calls = CallSet(engine.host, engine.host.owners(), function, device=engine.device)
        try:
            self._advance(calls, None)
            while pending := calls.pending():
                answers = exchange_requests(
                    pending,
                    links=engine.links,
                    placement=context.placement,
                    me=engine.session.worker,
                    label=label,
                )
                self._advance(calls, answers, later=pending.keys() - answers.keys())
        finally:
            calls.cancel()

    def _mirror(self, context: IterationContext) -> None:
        engine, host = self._engine, self._engine.host
        engine.script_writes.follow()
        placement = engine.rebuilding.mirrored(context.placement)
        engine.rebuilding.finish()
        # Their part of the gradients' norm comes before others' gradients have arrived.
        early = {c for c, shadow in host.shadows.items() if self._shadow_steps.can_wait(shadow)}
        # The first time it is also before anything is sent: a kernel's first launch may wait for the device to be idle,
        # which a send is not until it is received. After that the device sends while these launch.
        sends_first = self._shadow_steps.active and self._launched.issuperset(host.owned)
        if not sends_first:
            self._start_steps(early.union(host.owned))
            self._launched.update(host.owned)
        for replica in host.owners():
            holder = placement.shadow(replica.coordinate)
            if holder is None:
                continue
            host.activate(replica)
            gradients = gradient_tensors(engine.optimizer, engine.module)
            buffers = list(engine.module.buffers())
            tensors = [tensor.detach() for tensor in (*gradients, *buffers)]
            data = (len(gradients), gradient_flags(engine.optimizer), values_of(engine.basic_optimizer))
            engine.links.send(holder, Message(f"{context.activity}/mirror/{replica.coordinate}", data, tensors))
        if sends_first:
            self._start_steps(host.owned)
        messages = {
            c: engine.links.receive(placement.owner(c), f"{context.activity}/mirror/{c}", started=sends_first)
            for c in placement.shadowed_by(engine.session.worker)
        }
        if sends_first:
            # While others' gradients are on their way.
            self._start_in_time(early)
            self._handed_in = self._to_hand_in()
        for coordinate, message in messages.items():
            if message.arrival is not None:
                message.tensors = message.arrival.wait(engine.session.interruption)
            if coordinate in host.shadows:  # else its state has not come in time
                self._arrived.append((host.shadows[coordinate], message))
        if not sends_first:
            self._accept_arrived()

    def _accept_arrived(self) -> None:
        """Put the gradients that others have mirrored where the shadows' steps will look for them."""
        engine, host = self._engine, self._engine.host
        if not self._arrived:
            return
        for replica, message in self._arrived:
            replica.settle()
            host.activate(replica)
            count, flags, values_now = message.data
            values = [tensor.to(engine.device) for tensor in message.tensors]
            accept_gradients(engine.optimizer, engine.module, values[:count], flags)
            accept_values(engine.basic_optimizer, values_now)
            replica.pending_buffers = values[count:]
            replica.mirrored = True
        self._arrived.clear()
        host.save()

    def _to_hand_in(self) -> dict[str, Any]:
        """This worker's value for the agreement."""
        engine = self._engine
        engine.complete_data()
        calls = self._start_steps(engine.host.owned)
        value: dict[str, Any] = {"contributions": self._contributions(calls), "losses": stage_losses(engine)}
        value.update(engine.modes.contribution())
        value.update(engine.settling.contribution())
        value.update(engine.checkpoints.contribution() if engine.checkpoints is not None else {})
        value.update(engine.reconfiguration.balancing.contribution())
        wish = engine.reconfiguration.wish()
        if wish is not None:
            value["wish"] = wish.to_plain()
        return value

    def _commit(self) -> None:
        engine = self._engine
        value, self._handed_in = self._handed_in or self._to_hand_in(), None
        value.update(engine.rebuilding.contribution())
        value.update(engine.failover.contribution())
        for replica in engine.host.owners():
            engine.worker.strike_if_scripted(replica.coordinate, "commit")
        if self._shadow_steps.active:
            engine.activity.rounds.append(engine.worker.agree(value, meanwhile=self._prepare_step))
        else:
            self._prepare_step()
            engine.activity.rounds.append(engine.worker.agree(value))

    def _prepare_step(self) -> None:
        """What is left to do here before the step, while this worker waits for the others' agreement."""
        self._accept_arrived()
        self._start_in_time(self._engine.host.shadows.keys())

    def _start_in_time(self, shadows: Set[Coordinate]) -> None:
        """Begin the steps of ``shadows``, except those that begin after the agreement."""
        self._start_steps(shadows - self._may_be_late(self._steps()))

    def _steps(self) -> CallSet:
        """The steps of this iteration, of which none may have begun."""
        engine = self._engine
        if self._step_calls is None:
            calls = CallSet(engine.host, engine.host.replicas(), self._take_step, device=engine.device)
            if self._shadow_steps.active:
                calls.beside = dict.fromkeys(engine.host.shadows, self._shadow_steps)
            self._step_calls = calls
        return self._step_calls

    def _start_steps(self, coordinates: Container[Coordinate]) -> CallSet:
        """Begin the steps of ``coordinates``: each stops at its first collective, or before it changes a weight."""
        calls = self._running = self._steps()
        try:
            calls.start(coordinates)
        finally:
            self._running = None
        return calls

    def _contributions(self, calls: CallSet) -> dict[Coordinate, Any]:
        self._lead_on(calls)
        owned = self._engine.host.owned
        return {c: Contribution.of(request).to_plain() for c, request in calls.pending().items() if c in owned}

    def _lead_on(self, calls: CallSet) -> None:
        """What an owner hands in that was a shadow until a moment ago comes from another stream."""
        for coordinate in self._engine.host.owned.keys() & calls.beside.keys():
            calls.beside[coordinate].lead()

    def _advance(self, calls: CallSet, answers: Any, *, later: Container[Coordinate] = ()) -> None:
        self._running = calls
        try:
            calls.advance(answers, later=later)
        finally:
            self._running = None

    def _take_step(self) -> None:
        """Stock's step of the active replica; only the first owned one writes to the monitor."""
        engine = self._engine
        if engine.job_grid.stages == 1:
            # Nothing of such a step needs others before the agreement, so it would be through (fp16: the scale has
            # moved, an overflow is skipped and counted) before it is agreed upon.
            engine.pass_gate()
        active = engine.host.active
        if active is not None and active.coordinate in engine.host.shadows:
            with self._shadow_steps.beside(active):
                engine._take_model_step(None)
            return
        if engine.is_shown(active):
            engine._exec_optimizer_step()
        else:
            engine._take_model_step(None)
        if isinstance(engine._global_grad_norm, torch.Tensor):
            # For users it is where stock has it.
            engine._global_grad_norm = engine._global_grad_norm.to(engine.device, non_blocking=True)


def _contributed(agreed: Mapping[WorkerId, Any]) -> dict[Coordinate, Contribution]:
    """What all coordinates have handed in, from everybody's value in an agreement."""
    return {c: Contribution.from_plain(part) for value in agreed.values() for c, part in value["contributions"].items()}


def _apply_buffers(replica: StageReplica) -> None:
    if replica.pending_buffers is None:
        return
    with torch.no_grad():
        for target, value in zip(replica.module.buffers(), replica.pending_buffers, strict=True):
            target.copy_(value)
    replica.pending_buffers = None
