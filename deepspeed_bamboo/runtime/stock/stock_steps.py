"""What the end of an iteration lets stock DeepSpeed do and reads from it, for the stage that its engine shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deepspeed_bamboo.runtime.stock.buffers import BufferName, accept_buffers, named_buffers
from deepspeed_bamboo.runtime.stock.clipping import clipping_of
from deepspeed_bamboo.runtime.stock.gradients import (
    accept_gradients,
    gradient_flags,
    gradient_tensors,
    remember_gradients,
)
from deepspeed_bamboo.runtime.stock.hook_values import HookState, accept_hook_state
from deepspeed_bamboo.runtime.stock.hyperparameters import accept_values, values_of
from deepspeed_bamboo.runtime.stock.plain_values import PlainValues, accept_plain_values
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Mirrored = tuple[list[bool], Any, Any, list[BufferName], PlainValues, list[HookState | None]]
"""Which parameters are trained, flags of their gradients, values of the optimizer's groups; buffers; values of layers;
what hooks and attributes keep, with the number of their tensors, None for none that move.

The tensors are the gradients, then the buffers, and then those of hooks.
"""


class SteppingEngine(Protocol):
    """What reductions and steps use of an engine, most of it stock's, of its active stage."""

    device: torch.device
    is_data_parallel: bool
    using_bf16_optimizer: bool
    micro_batches: int
    module: Any
    optimizer: Any
    basic_optimizer: Any
    _global_grad_norm: Any

    def train_batch_size(self) -> int:
        """Samples of an iteration, of all pipelines."""

    def is_shown(self, replica: StageReplica | None) -> bool:
        """True for the one replica of this worker that represents it on the console and in monitors."""

    def _exec_reduce_tied_grads(self) -> None: ...
    def _exec_reduce_grads(self) -> None: ...
    def _exec_optimizer_step(self) -> None: ...
    def _take_model_step(self, lr_kwargs: Any) -> None: ...


class StockSteps:
    """The methods of stock's engine that reduce gradients and take steps.

    Args:
        engine: whose active stage they act on.
    """

    def __init__(self, engine: SteppingEngine) -> None:
        self._engine = engine

    def reduce_tied(self) -> None:
        """Add up the gradients of tied weights over the stages that share them."""
        self._engine._exec_reduce_tied_grads()

    def reduce(self) -> None:
        """Average the gradients over the pipelines."""
        self._engine._exec_reduce_grads()

    def remember_gradients(self) -> Callable[[], None]:
        """Returns what puts the gradients back to what they are now, before they are reduced."""
        engine = self._engine
        touched: Sequence[torch.Tensor | None] = []
        if engine.is_data_parallel:
            touched = gradient_tensors(engine.optimizer, engine.module)
        elif engine.module.tied_comms:
            touched = [
                weight._hp_grad if engine.using_bf16_optimizer else weight.grad
                for weight, _ in engine.module.get_tied_weights_and_groups()
            ]
        return remember_gradients(
            engine.optimizer, engine.module, touched=[tensor for tensor in touched if tensor is not None]
        )

    def mirrored(self, replica: StageReplica) -> tuple[Mirrored, list[torch.Tensor]]:
        """What a shadow of ``replica``, the active one, needs to take the same step: gradients and buffers, as they
        are on this device, and what forwards have changed of layers and hooks."""
        engine = self._engine
        gradients = gradient_tensors(engine.optimizer, engine.module)
        buffers = named_buffers(engine.module)
        # Those of an offloaded optimizer are on the host, and all else travels from the device.
        tensors = [tensor.detach().to(engine.device) for tensor in (*gradients, *buffers.values())]
        trained = [parameter.requires_grad for parameter in engine.module.parameters()]
        replica.moving.look(engine.module)
        values = replica.moving.values(engine.module)
        flags, groups = gradient_flags(engine.optimizer), values_of(engine.basic_optimizer)
        replica.moving_hooks.look(engine.module)
        replica.moving_attributes.look(engine.module, by_script=False)
        held = [replica.moving_hooks.state(), replica.moving_attributes.state(engine.module)]
        for state in held:
            if state is not None and state["tensors"] is not None:
                tensors += [tensor.to(engine.device) for tensor in state["tensors"]]
                state["tensors"] = len(state["tensors"])
        return (trained, flags, (groups, clipping_of(engine.optimizer)), [*buffers], values, held), tensors

    def accept(self, replica: StageReplica, data: Mirrored, tensors: Sequence[torch.Tensor]) -> None:
        """Put what an owner has mirrored where the step of ``replica``, the active one, looks for it."""
        engine = self._engine
        trained, flags, (values_now, clip), names, replica.pending_values, held = data
        values = [tensor.to(engine.device) for tensor in tensors]
        replica.pending_attributes, replica.pending_hooks = (_with_tensors(state, values) for state in reversed(held))
        count = len(values) - len(names)
        for parameter, its in zip(engine.module.parameters(), trained, strict=False):
            if parameter.requires_grad != its:  # the script has frozen or thawed it since the last step
                parameter.requires_grad_(its)
        accept_gradients(engine.optimizer, engine.module, values[:count], flags)
        if len(values_now) == len(engine.basic_optimizer.param_groups):  # else this shadow is about to be made anew
            accept_values(engine.basic_optimizer, values_now)
        if clip is not None:
            engine.optimizer.clip_grad = clip
        replica.pending_buffers = dict(zip(names, values[count:], strict=True))
        replica.mirrored = True

    def take_quiet_step(self) -> None:
        """Stock's step, of which neither console nor monitor hears."""
        self._engine._take_model_step(None)

    def count_to(self, step: int) -> None:
        """Be at ``step``, on a worker that stands by: what stock counts in its steps."""
        engine, state = self._engine, self._engine.__dict__
        more = step - int(state["global_steps"])
        state["global_steps"] = step
        state["global_samples"] += more * engine.train_batch_size()
        state["micro_steps"] += more * engine.micro_batches

    def take_step(self, active: StageReplica | None) -> None:
        """Stock's step of ``active``, which this worker owns; its first stage stands for it on console and monitor."""
        engine = self._engine
        if engine.is_shown(active):
            engine._exec_optimizer_step()
        else:
            engine._take_model_step(None)
        if isinstance(engine._global_grad_norm, torch.Tensor):
            # For users it is where stock has it.
            engine._global_grad_norm = engine._global_grad_norm.to(engine.device, non_blocking=True)


def _with_tensors(state: HookState | None, tensors: list[torch.Tensor]) -> HookState | None:
    """``state``, which says how many of the last ``tensors`` are its own, with these, taken from there."""
    if state is None or state["tensors"] is None:
        return state
    first = len(tensors) - state["tensors"]
    own = tensors[first:]
    del tensors[first:]
    return {**state, "tensors": own}


def apply_buffers(replica: StageReplica) -> None:
    """With the step, the module's buffers and layers' values become those that its owner has mirrored."""
    accept_plain_values(replica.module, replica.pending_values)
    replica.moving.include(replica.pending_values)
    replica.moving_hooks.include(replica.pending_hooks)
    replica.pending_values = {}
    accept_hook_state(replica.module, replica.pending_hooks)
    replica.pending_hooks = None
    replica.moving_attributes.include(replica.pending_attributes)
    replica.moving_attributes.accept(replica.module, replica.pending_attributes)
    replica.pending_attributes = None
    if replica.pending_buffers is None:
        return
    accept_buffers(replica.module, replica.pending_buffers)
    replica.pending_buffers = None
