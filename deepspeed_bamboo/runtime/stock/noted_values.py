"""What a script has set in layers and hooks of a stage between two steps, for replicas of that stage and for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.runtime.stock.hook_values import HookState, accept_hook_state
from deepspeed_bamboo.runtime.stock.plain_values import PlainValues, accept_plain_values
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Held = Sequence[HookState | None]
"""What hooks keep, and what attributes do; tensors are copies in the host's memory."""


@dataclass(frozen=True)
class NotedValues:
    """Of the stage ``coordinate``: numbers and words; ``held``: what hooks and attributes keep, if that changed."""

    coordinate: str
    values: PlainValues
    held: Held | None = None

    @classmethod
    def of(cls, values: Mapping[str, PlainValues], held: Mapping[str, Any]) -> list[NotedValues]:
        """One for each stage, by coordinate."""
        return [cls(stage, values.get(stage, {}), held.get(stage)) for stage in dict.fromkeys((*values, *held))]

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return sum(tensor.nbytes for state in self.held or () if state for tensor in state["tensors"] or ())

    def put_into(self, replica: StageReplica, *, shadow: bool) -> None:
        """Where ``replica``, a ``shadow`` or not, is of this stage."""
        if str(replica.coordinate) != self.coordinate:
            return
        replica.finish_step()
        accept_plain_values(replica.module, self.values)
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
