"""What a stage is in outline: cheap enough to look at before every step, and enough to see that a script changed it."""

from __future__ import annotations

from typing import Any

from deepspeed_bamboo.runtime.stock.description import MODULE_HOOKS, PARAMETER_HOOKS
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Outline = tuple[Any, ...]


def outline_of(replica: StageReplica) -> Outline:
    """Classes of modules, hooks by the name of their code, types and ``requires_grad``, sizes of parameter groups.

    Equal for a hook that the script removes and registers again.
    """
    parts: list[Any] = []
    for part in replica.module.modules():
        kept = part.__dict__
        parts.append(part.__class__)
        parts += [_names(kept[kind]) for kind in MODULE_HOOKS if kept.get(kind)]  # hardly any has one
        for name, parameter in kept["_parameters"].items():
            if parameter is None:
                parts.append(name)
                continue
            parts += (name, parameter.requires_grad, parameter.dtype)
            parts += [_names(found) for kind in PARAMETER_HOOKS if (found := getattr(parameter, kind, None))]
    optimizer = replica.attributes["basic_optimizer"]
    parts += [len(group["params"]) for group in (() if optimizer is None else optimizer.param_groups)]
    return tuple(parts)


def _names(hooks: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(getattr(hook, "__qualname__", None) or hook.__class__ for hook in hooks.values())
