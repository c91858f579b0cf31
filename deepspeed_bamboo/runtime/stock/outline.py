"""The outline of a stage: cheap enough to compare before every step, and enough to see that a script changed it."""

from __future__ import annotations

from typing import Any

from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.script_hooks import LOSS, MODULE_HOOKS, PARAMETER_HOOKS

Outline = tuple[Any, ...]


def outline_of(replica: StageReplica) -> Outline:
    """Classes of modules, types and ``requires_grad`` of parameters, the code of hooks, sizes of parameter groups.

    And which loss function and what kind of optimizer it is.
    """
    parts: list[Any] = []
    for part in replica.module.modules():
        kept = part.__dict__
        parts.append(part.__class__)
        for kind in MODULE_HOOKS:
            if kept[kind]:
                parts += map(_code, kept[kind].values())
        for name, parameter in kept["_parameters"].items():
            if parameter is None:
                parts.append(name)
                continue
            parts += (name, parameter.requires_grad, parameter.dtype)
            for kind in PARAMETER_HOOKS:
                parts += map(_code, (getattr(parameter, kind, None) or {}).values())
    optimizer = replica.attributes["basic_optimizer"]
    # The objects themselves: a script that puts others in their place means others.
    parts += [optimizer.__class__, replica.attributes["optimizer"].__class__, id(replica.module.__dict__.get(LOSS))]
    parts += [len(group["params"]) for group in (() if optimizer is None else optimizer.param_groups)]
    return tuple(parts)


def _code(hook: Any) -> Any:
    """What tells hooks apart: not the object, which a script may make anew for each step."""
    function = getattr(hook, "__func__", hook)
    return getattr(function, "__code__", function.__class__)
