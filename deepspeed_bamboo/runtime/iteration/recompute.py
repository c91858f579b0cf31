"""Redundant forwards that keep only their input. After a loss they compute again what a backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.script_state import ScriptState, restore_script_state, script_state

_NO_HOOKS = "saved tensor hooks"  # with this torch.func refuses to work inside of them


class _GraphNeededError(RuntimeError):
    """Something asks for a gradient through a graph that keeps nothing."""


class RunningTotals(Protocol):
    """What forwards of the active stage add to: an engine."""

    total_loss: Any
    total_additional_losses: Any
    fwd_outputs: list[Any]


# Kernels change some buffers without torch counting it: batch norm its statistics. Those are small.
_COUNTED_NUMBERS = 1 << 16


@dataclass(frozen=True)
class BufferState:
    """A module's buffers at one moment, with the count of changes that torch keeps for each; and what else moves."""

    values: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    script: ScriptState | None = None


def buffer_state(module: torch.nn.Module, *, previous: BufferState | None) -> BufferState:
    """Copies of ``module``'s buffers; large ones that are unchanged since ``previous`` are shared with it."""
    values, versions = [], []
    for index, buffer in enumerate(module.buffers()):
        unchanged = previous is not None and _is_counted(buffer) and previous.versions[index] == buffer._version
        values.append(previous.values[index] if unchanged and previous is not None else buffer.clone())
        versions.append(buffer._version)
    return BufferState(tuple(values), tuple(versions))


def _is_counted(buffer: torch.Tensor) -> bool:
    """Whether torch's count of changes tells all about ``buffer``."""
    return buffer.numel() > _COUNTED_NUMBERS


def keep_only_input(replica: StageReplica, micro_batch: int, forward: Callable[[], None]) -> None:
    """Run ``forward`` of ``micro_batch``, note what the module's buffers were before it, and keep nothing of its graph.

    Not without gradients: some kernels (an LSTM's, attention's) compute other last bits then than the owner's do.
    """
    state = state_before(replica, previous=next(reversed(replica.without_graph.values()), None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_drop, _needed):
            forward()
    except RuntimeError as error:
        if not isinstance(error, _GraphNeededError) and _NO_HOOKS not in str(error):
            raise
        # A layer takes gradients in its forward: keep the whole graph for as long as that takes.
        restore_state(state, replica)
        forward()
    replica.without_graph[micro_batch] = state


def _drop(_tensor: torch.Tensor) -> None:
    """In place of a tensor that autograd would keep for a backward that will not be done with this graph."""


def _needed(_nothing: None) -> torch.Tensor:
    raise _GraphNeededError("a backward through a forward that kept only its input")


def recompute_if_dropped(
    engine: RunningTotals, replica: StageReplica, micro_batch: int, forward: Callable[[], None]
) -> None:
    """Run ``forward`` of ``micro_batch`` again, with a graph, if it had none; it leaves no other trace."""
    state = replica.without_graph.pop(micro_batch, None)
    if state is None:
        return
    progress = replica.progress
    totals = engine.total_loss, engine.total_additional_losses, engine.fwd_outputs
    engine.total_loss, engine.total_additional_losses, engine.fwd_outputs = None, None, []
    with _as_in(state, replica):
        forward()
    engine.total_loss, engine.total_additional_losses, engine.fwd_outputs = totals
    replica.progress = progress


def state_before(replica: StageReplica, *, previous: BufferState | None) -> BufferState:
    """What a forward of ``replica`` may change; see :func:`buffer_state`."""
    buffers = buffer_state(replica.module, previous=previous)
    return replace(buffers, script=script_state(replica))


def restore_state(state: BufferState, replica: StageReplica) -> None:
    """Make it what it was at ``state``."""
    restore_buffers(state, replica.module)
    if state.script is not None:
        restore_script_state(state.script, replica)


@contextmanager
def _as_in(state: BufferState, replica: StageReplica) -> Iterator[None]:
    current = state_before(replica, previous=None)
    restore_state(state, replica)
    try:
        yield
    finally:
        restore_state(current, replica)


def restore_buffers(state: BufferState, module: torch.nn.Module) -> None:
    """Give ``module``'s buffers the values that they had at ``state``.

    Graphs of other micro-batches may have noted a buffer, as batch norm's do, and would refuse one that was changed as
    far as torch counts. So small ones are changed uncounted, and large ones only where they differ.
    """
    with torch.no_grad():
        for buffer, value, version in zip(module.buffers(), state.values, state.versions, strict=True):
            if not _is_counted(buffer):
                buffer.data.copy_(value)
            elif buffer._version != version:
                buffer.copy_(value)
