"""What has moved in layers and hooks of a stage between two steps, for replicas of that stage and for later.

A script sets attributes, and what hooks keep. An evaluation moves buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.buffers import BufferName, accept_buffers
from deepspeed_bamboo.runtime.stock.hook_values import HookState, accept_hook_state
from deepspeed_bamboo.runtime.stock.plain_forms import device_of
from deepspeed_bamboo.runtime.stock.plain_values import PlainValues, accept_plain_values
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Held = Sequence[HookState | None]
"""What hooks keep, and what attributes do; tensors are copies in the host's memory."""


@dataclass(frozen=True)
class NotedValues:
    """Of the stage ``coordinate``: numbers and words; ``held``: what hooks and attributes keep, if that changed;
    ``buffers``: those that have moved, in the host's memory."""

    coordinate: str
    values: PlainValues
    held: Held | None = None
    buffers: Mapping[BufferName, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, PlainValues], held: Mapping[str, Any]) -> list[NotedValues]:
        """One for each stage, by coordinate."""
        return [cls(stage, values.get(stage, {}), held.get(stage)) for stage in dict.fromkeys((*values, *held))]

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        held = (tensor for state in self.held or () if state for tensor in state["tensors"] or ())
        return sum(tensor.nbytes for tensor in (*held, *self.buffers.values()))

    def put_into(self, replica: StageReplica, *, shadow: bool) -> None:
        """Where ``replica``, a ``shadow`` or not, is of this stage."""
        if str(replica.coordinate) != self.coordinate:
            return
        replica.finish_step()
        accept_plain_values(replica.module, self.values)
        device = device_of(replica.module)
        accept_buffers(replica.module, {name: value.to(device) for name, value in self.buffers.items()})
        if self.held is None:
            return
        hooks, attributes = (_own(state) for state in self.held)
        accept_hook_state(replica.module, hooks)
        if shadow:
            replica.moving_hooks.include(hooks)
        replica.moving_attributes.accept(replica.module, attributes)


def _own(state: HookState | None) -> HookState | None:
    """With tensors of its own, which may become the module's."""
    if not state or state["tensors"] is None:
        return state
    return {**state, "tensors": [tensor.clone() for tensor in state["tensors"]]}
