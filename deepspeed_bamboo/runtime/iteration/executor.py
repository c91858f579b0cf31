"""Carries out instructions: each op of ``core.instructions`` by the stock engine's own methods where there is one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_bamboo.core.communication import peer
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import RECEIVES, SENDS, Instruction, Op
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import ModelError
from deepspeed_bamboo.pulse import IN_SCRIPT, Pulse
from deepspeed_bamboo.runtime.comm.all_gather import expected_of
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration.messages import (
    IterationContext,
    holder_of,
    key_of,
    kind_of,
    receiver_of,
    receives,
    sender_of,
    sends_behind,
)
from deepspeed_bamboo.runtime.iteration.pass_engine import PassEngine
from deepspeed_bamboo.runtime.iteration.pass_times import PassTimes
from deepspeed_bamboo.runtime.iteration.recompute import recompute_if_dropped
from deepspeed_bamboo.runtime.iteration.redundant_forwards import RedundantForwards
from deepspeed_bamboo.runtime.iteration.speculative_launch import Deferral
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.randomness import ModelGenerators, forward_seed
from deepspeed_bamboo.runtime.stock.replica import StageReplica, Tensors

# Where a scripted fault strikes: the names of faults.py for the instructions of a micro-batch.
FAULT_POINTS = {
    Op.FNC: "forward",
    Op.BNC: "backward",
    Op.SEND_ACTIVATION: "send_activation",
    Op.SEND_GRAD: "send_grad",
}
_REDUNDANT = frozenset({Op.FRC, Op.BRC})
_PASSES = frozenset({Op.FNC, Op.BNC}) | _REDUNDANT


class Executor:
    """Executes the per-micro-batch instructions of one worker.

    Args:
        engine: whose stock methods do the computing.
        host: the replicas.
        links: messages to other workers.
        me: this worker's id.
        seed: returns the job's seed for forwards.
        before: called before every instruction with the instruction and the replica it concerns.
        after: called after it.
        redundant: which redundant forwards are done, and how.
        pulse: where it is noted what the main thread does.
    """

    def __init__(
        self,
        engine: PassEngine,
        *,
        host: StageHost,
        links: Links,
        me: WorkerId,
        seed: Callable[[], int],
        before: Callable[[Instruction, StageReplica], None],
        after: Callable[[Instruction, StageReplica], None],
        redundant: RedundantForwards,
        pulse: Pulse,
    ) -> None:
        self._engine = engine
        self._host = host
        self._links = links
        self._me = me
        self._seed = seed
        self._before = before
        self._after = after
        self._redundant, self._pulse = redundant, pulse
        on_gpu = engine.device.type == "cuda"
        self.times = PassTimes(engine.device, allocated=torch.cuda.memory_allocated if on_gpu else None)
        self._interruption = engine.session.interruption
        self._deferral = Deferral(engine, host=host, interruption=self._interruption)
        self._generators = ModelGenerators(engine.device)
        self._followed_by: dict[tuple[Op, Coordinate | None, int | None], list[Instruction]] = {}
        self._methods: dict[Op, Callable[[StageReplica, int, IterationContext], None]] = {
            Op.LOAD: self._load,
            Op.FNC: self._forward,
            Op.BNC: self._backward,
            Op.FRC: self._redundant_forward,
            Op.BRC: self._redundant_backward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._receive_activation,
            Op.SEND_GRAD: self._send_gradient,
            Op.RECV_GRAD: self._receive_gradient,
        }

    def execute(self, instruction: Instruction, context: IterationContext) -> None:
        """Carry out one instruction of a coordinate. Raises what interrupts a wait, and user errors."""
        if instruction.micro_batch is None:
            raise ValueError(f"{instruction} is not an instruction of a coordinate")
        self._pulse.at(instruction)
        replica = self._replica(instruction)
        deferred = self._deferral.covers(instruction, replica)
        if not deferred:
            self._deferral.confirm()
            if instruction.op in _PASSES:
                # A worker with several inputs at hand would do all their passes first, and the others would wait.
                self._interruption.check()
        if instruction.op is not Op.SEND_GRAD:
            self._host.gradient_updates.flush()
        self._before(instruction, replica)
        for send in self._followed_by.get((instruction.op, instruction.coordinate, instruction.micro_batch), ()):
            self._announce(send, context)
        self._host.activate(replica)
        if instruction.op in (Op.FNC, Op.BNC):
            self._redundant.bubbles.ends()
        if instruction.to_shadow:
            context = dataclasses.replace(context, for_shadow=True)
        with self._deferral.launching(instruction) if deferred else nullcontext(), self._timed(instruction, context):
            self._methods[instruction.op](replica, instruction.micro_batch, context)
        self._after(instruction, replica)
        if instruction.op is Op.SEND_ACTIVATION:
            self._engine.iteration_end.launch_late_steps()

    def _timed(self, instruction: Instruction, context: IterationContext) -> AbstractContextManager[None]:
        """Measures passes of stages that this worker owns."""
        micro_batch = instruction.micro_batch
        if instruction.coordinate is None or not context.training or instruction.op not in (Op.FNC, Op.BNC):
            return nullcontext()
        if micro_batch is None or not self.times.wants(micro_batch, of=context.micro_batches):
            return nullcontext()
        return self.times.measuring(instruction.coordinate, forward=instruction.op is Op.FNC)

    def attempt(self, kind: str, body: Callable[[], None]) -> None:
        """Call ``body``, an activity of that ``kind``, and :meth:`leave_passes`, whatever it raised."""
        self._pulse.at(kind)
        try:
            body()
            self.leave_passes()
        except BaseException as error:
            self._deferral.end(error)
            raise
        finally:
            self.leave_passes()
            self._pulse.at(IN_SCRIPT)

    def expect(self, program: Sequence[Instruction], context: IterationContext) -> None:
        """Say what ``program`` receives, so that it is received as soon as it is sent; look ahead to what it sends."""
        messages = {(i.op, i.coordinate, i.to_shadow): i for i in program if i.op in SENDS | RECEIVES}
        self._links.meet(peer(message, placement=context.placement) for message in messages.values())
        placement = context.placement
        expected = Counter(placement.owner(sender_of(i)) for i in program if i.op in RECEIVES)
        ops = {instruction.op for instruction in program}
        if Op.MIRROR in ops:
            expected.update(placement.owner(coordinate) for coordinate in placement.shadowed_by(self._me))
        record = self._interruption.active
        if Op.COMMIT in ops and record is not None:
            expected.update(expected_of(self._me, record.members))
        self._links.expect(expected)
        away = [i for i in program if i.op not in SENDS or receiver_of(i, context) != self._me]
        self._followed_by = {} if self._engine.dynamic_shape else sends_behind(away)

    def _announce(self, send: Instruction, context: IterationContext) -> None:
        """Before the pass whose result ``send`` sends, so that the receiver is ready when the result is."""
        if send.coordinate is None or send.micro_batch is None:
            return
        receiver = receiver_of(send, context)
        context = dataclasses.replace(context, for_shadow=send.to_shadow)
        name = "activation" if send.op is Op.SEND_ACTIVATION else "gradient"
        key = key_of(name, send.coordinate, send.micro_batch, context)
        self._links.announce(receiver, key, kind=kind_of(name, send.coordinate, context))

    def leave_passes(self) -> None:
        """Before other code runs: gradients are accumulated, and random number generators are the user's again.

        Raises what interrupts the wait for what was used and not yet seen to arrive.
        """
        self._deferral.confirm()
        self._host.gradient_updates.flush()
        self._generators.give_back()

    def _seed_generators(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        step = context.step if context.training else replica.micro_offset
        seed = forward_seed(
            self._seed(),
            step=step,
            coordinate=replica.coordinate,
            micro_batch=micro_batch,
            training=context.training,
        )
        self._generators.seed(seed, module=self._engine.module, activity=(context.training, step))

    def _replica(self, instruction: Instruction) -> StageReplica:
        """The replica whose state the instruction uses: the shadow for redundant work and what feeds it."""
        coordinate = instruction.coordinate
        if coordinate is None:
            raise ValueError(f"{instruction} is not an instruction of a coordinate")
        owned, shadow = self._host.owned.get(coordinate), self._host.shadows.get(coordinate)
        redundant = instruction.op in _REDUNDANT or (instruction.to_shadow and instruction.op in RECEIVES)
        replica = shadow if redundant or owned is None else owned
        if replica is not None:
            replica.finish_step()
        if replica is None:
            raise RuntimeError(f"{instruction}: worker {self._me} holds no replica of {coordinate} for it")
        return replica

    def _load(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        if not self._engine.feed.has_read(replica.coordinate, micro_batch):
            self._generators.give_back()  # the user's iterator may draw, too
        self._engine.feed.next_micro_batch = micro_batch
        self._engine._exec_load_micro_batch(buffer_id=micro_batch)
        _advance(replica, loaded=micro_batch + 1)

    def _forward(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        engine = self._engine
        engine.module.micro_offset = replica.micro_offset + micro_batch
        self._seed_generators(replica, micro_batch, context)
        if receives(replica.coordinate, me=self._me, context=context):
            self._deferral.note_buffers(replica, micro_batch)
        engine.stock_forward(buffer_id=micro_batch)
        outputs = engine.pipe_buffers["outputs"][micro_batch]
        if engine.is_last_stage():
            replica.losses[micro_batch] = engine.loss
            if not context.training:
                engine.pipe_buffers["outputs"][micro_batch] = None
        else:
            if context.training and torch.is_grad_enabled():
                interval = self._engine.module.activation_checkpoint_interval
                _check_outputs(outputs, replica.coordinate, checkpoints=bool(interval))
            replica.retained_outputs[micro_batch] = _detached(outputs)
        if not context.training:
            engine.pipe_buffers["inputs"][micro_batch] = None
            engine.pipe_buffers["outputs"][micro_batch] = None
        _advance(replica, forwards=micro_batch + 1)

    def _redundant_forward(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        """The shadow's forward; its input is what the predecessor, hosted here, has just produced (architecture 1)."""
        due = self._redundant.due(replica, micro_batch)
        if due is None:
            return
        bubbles = self._redundant.bubbles
        if self._redundant.optional and not bubbles.fits((replica.coordinate, micro_batch), program=context.placement):
            return
        micro_batch = due
        before = Coordinate(replica.coordinate.pipeline, replica.coordinate.stage - 1)
        if replica.coordinate.stage > 0 and self._engine.pipe_buffers["inputs"][micro_batch] is None:
            outputs = self._host.owned[before].retained_outputs[micro_batch]
            self._engine.pipe_buffers["inputs"][micro_batch] = _as_inputs(outputs)
        self._redundant.run(replica, micro_batch, lambda: self._forward(replica, micro_batch, context))
        if micro_batch in replica.without_graph:
            self._drop_graph(replica, micro_batch)
        bubbles.done()

    def _drop_graph(self, replica: StageReplica, micro_batch: int) -> None:
        """Let go of the graph of a forward that will be done again before its backward."""
        engine, outputs = self._engine, self._engine.pipe_buffers["outputs"]
        outputs[micro_batch] = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs[micro_batch])
        if engine.is_last_stage():
            engine.loss = tree_map_only(torch.Tensor, torch.Tensor.detach, replica.losses[micro_batch])
            replica.losses[micro_batch] = engine.loss

    def _redundant_backward(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        """The shadow's backward; its gradient is a message, or the input gradient of a successor hosted here."""
        after = self._host.owned.get(Coordinate(replica.coordinate.pipeline, replica.coordinate.stage + 1))
        if after is not None and micro_batch not in replica.received_gradients:
            gradients = after.retained_gradients[micro_batch]
            single = isinstance(replica.retained_outputs[micro_batch], torch.Tensor)
            replica.received_gradients[micro_batch] = gradients[0] if single else gradients
        self._backward(replica, micro_batch, context)

    def _backward(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        engine = self._engine
        recompute_if_dropped(engine, replica, micro_batch, lambda: self._forward(replica, micro_batch, context))
        if engine.is_last_stage():
            engine.loss = replica.losses.pop(micro_batch)
        else:
            engine.grad_layer = replica.received_gradients.pop(micro_batch)
        self._seed_generators(replica, micro_batch, context)
        engine.stock_backward(buffer_id=micro_batch)
        if not engine.is_first_stage():
            inputs = engine.pipe_buffers["inputs"][micro_batch]
            replica.retained_gradients[micro_batch] = _input_gradients(inputs, replica.coordinate)
        if not self._deferral.holds(replica, micro_batch):
            self._host.drop_micro_batch(replica, micro_batch)
        engine.grad_layer = None
        _advance(replica, backwards=micro_batch + 1)

    def _send_activation(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        outputs = replica.retained_outputs[micro_batch]
        single = isinstance(outputs, torch.Tensor)
        receiver = holder_of(Coordinate(replica.coordinate.pipeline, replica.coordinate.stage + 1), context)
        if receiver == self._me:
            return  # which takes it from here
        self._links.send(
            receiver,
            Message(
                key_of("activation", replica.coordinate, micro_batch, context),
                kind=kind_of("activation", replica.coordinate, context),
                data=single,
                tensors=[outputs] if isinstance(outputs, torch.Tensor) else list(outputs),
            ),
        )

    def _receive_activation(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        sender = Coordinate(replica.coordinate.pipeline, replica.coordinate.stage - 1)
        if context.placement.owner(sender) == self._me:
            # Stock copies inputs before it computes with them, so they can share the outputs' memory.
            shared = _detached(self._host.owned[sender].retained_outputs[micro_batch])
            self._engine.pipe_buffers["inputs"][micro_batch] = _as_inputs(shared, copy=False)
            _advance(replica, activations_received=micro_batch + 1)
            return
        key = key_of("activation", sender, micro_batch, context)
        message = self._links.receive(context.placement.owner(sender), key, unseen=self._deferral.allows(replica))
        received = tuple(tensor.to(self._engine.device).detach() for tensor in message.tensors)
        # Else it may be a piece of a message, or belong to this worker's other coordinate.
        inputs = _as_inputs(received[0] if message.data else received, copy=not message.by_lane)
        self._engine.pipe_buffers["inputs"][micro_batch] = inputs
        if message.arrival is not None:
            self._deferral.begin(replica, micro_batch, receive=Op.RECV_ACTIVATION, arrival=message.arrival)
            self._redundant.bubbles.arrives(message.arrival.complete)
        _advance(replica, activations_received=micro_batch + 1)

    def _send_gradient(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        receiver = holder_of(Coordinate(replica.coordinate.pipeline, replica.coordinate.stage - 1), context)
        if receiver == self._me:
            return  # which takes it from here
        self._links.send(
            receiver,
            Message(
                key_of("gradient", replica.coordinate, micro_batch, context),
                kind=kind_of("gradient", replica.coordinate, context),
                tensors=list(replica.retained_gradients[micro_batch]),
            ),
        )

    def _receive_gradient(self, replica: StageReplica, micro_batch: int, context: IterationContext) -> None:
        sender = Coordinate(replica.coordinate.pipeline, replica.coordinate.stage + 1)
        single = isinstance(replica.retained_outputs.get(micro_batch), torch.Tensor)
        if context.placement.owner(sender) == self._me:
            own = self._host.owned[sender].retained_gradients[micro_batch]
            replica.received_gradients[micro_batch] = own[0] if single else list(own)
            _advance(replica, gradients_received=micro_batch + 1)
            return
        key = key_of("gradient", sender, micro_batch, context)
        message = self._links.receive(context.placement.owner(sender), key, unseen=self._deferral.allows(replica))
        gradients = [tensor.to(self._engine.device) for tensor in message.tensors]
        replica.received_gradients[micro_batch] = gradients[0] if single else gradients
        if message.arrival is not None:
            self._deferral.begin(replica, micro_batch, receive=Op.RECV_GRAD, arrival=message.arrival)
            self._redundant.bubbles.arrives(message.arrival.complete)
        _advance(replica, gradients_received=micro_batch + 1)


def _as_inputs(outputs: Tensors, *, copy: bool = True) -> Tensors:
    """A stage's outputs, by default copies of them, as leaves: what a stage receives over a channel."""
    single = isinstance(outputs, torch.Tensor)
    copies = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if copy:
        copies = [tensor.clone() for tensor in copies]
    for tensor in copies:
        tensor.requires_grad = tensor.is_floating_point()
    return copies[0] if single else tuple(copies)


def _advance(replica: StageReplica, **counts: int) -> None:
    replica.progress = replica.progress._replace(**counts)


def _detached(outputs: Any) -> Tensors:
    """A stage's outputs for the next one: contiguous, as a message has them, whether it is another worker's or not."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().contiguous()
    if isinstance(outputs, (tuple, list)):
        return tuple(output.detach().contiguous() for output in outputs)
    raise ModelError(
        f"a stage's output is a {type(outputs).__name__}; the last layer of a stage must return a tensor or a tuple "
        "of tensors, since that is what travels to the next stage"
    )


_OF_CHECKPOINTS = (
    " With activation checkpoints the cause may be these: DeepSpeed's reentrant function gives no gradient to layers "
    "whose inputs have none, such as an embedding of tokens. Set "
    '"pipeline": {"use_reentrant": false} in the configuration, or name the layers to checkpoint without that one '
    "(PipelineModule(checkpointable_layers=[class names]))"
)


def _check_outputs(outputs: Any, coordinate: Coordinate, *, checkpoints: bool) -> None:
    for slot, tensor in enumerate([outputs] if isinstance(outputs, torch.Tensor) else outputs):
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(
                f"stage {coordinate.stage} returns a {type(tensor).__name__} in slot {slot} of its output; "
                "only tensors travel between stages"
            )
        if tensor.is_floating_point() and not tensor.requires_grad:
            raise ModelError(
                f"stage {coordinate.stage} sends a tensor without gradient: slot {slot}, {tensor.dtype}, shape "
                f"{tuple(tensor.shape)}. DeepSpeed expects a gradient for every floating-point tensor between "
                "stages; send it as an integer or boolean tensor, or compute it inside the next stage."
                + (_OF_CHECKPOINTS if checkpoints else "")
            )


def _input_gradients(inputs: Tensors, coordinate: Coordinate) -> list[torch.Tensor]:
    gradients = []
    for slot, tensor in enumerate([inputs] if isinstance(inputs, torch.Tensor) else inputs):
        if not tensor.is_floating_point():
            continue
        if tensor.grad is None:
            raise ModelError(
                f"stage {coordinate.stage} does not use its input in slot {slot} ({tensor.dtype}, shape "
                f"{tuple(tensor.shape)}), so there is no gradient for the stage before it. Use the tensor, or do not "
                "send it as a floating-point tensor."
            )
        gradients.append(tensor.grad.contiguous())
    return gradients
