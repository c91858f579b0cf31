"""What forwards and backwards of a stage move besides buffers: attributes of layers, and what hooks keep.

It is noted before a pass that may have to be repeated, and brought back before that: so a count counts each pass once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_bamboo.runtime.stock.held_attributes import AttributeState
from deepspeed_bamboo.runtime.stock.hook_values import HookState, accept_hook_state, hook_state
from deepspeed_bamboo.runtime.stock.plain_values import PlainValues, accept_plain_values
from deepspeed_bamboo.runtime.stock.replica import StageReplica


@dataclass(frozen=True)
class ScriptState:
    """Of one replica at one moment; empty where nothing moves."""

    values: PlainValues = field(default_factory=dict)
    hooks: HookState | None = None
    attributes: AttributeState | None = None


def script_state(replica: StageReplica) -> ScriptState:
    """Of what moves in ``replica``, or may move as long as nobody has looked twice."""
    module = replica.module
    return ScriptState(
        replica.moving.at_risk(module),
        hook_state(module) if replica.moving_hooks.at_risk else None,
        replica.moving_attributes.state(module, here=True),
    )


def restore_script_state(state: ScriptState, replica: StageReplica) -> None:
    """Make it what it was. Graphs of other micro-batches may have kept a tensor, so it gets others in their place."""
    accept_plain_values(replica.module, state.values)
    accept_hook_state(replica.module, state.hooks, new_tensors=True)
    replica.moving_attributes.accept(replica.module, state.attributes, new_tensors=True)
