"""The outline of a stage: cheap enough to compare before every step, and enough to see that a script changed it."""

from __future__ import annotations

from typing import Any

from deepspeed_bamboo.runtime.stock.replica import StageReplica

Outline = tuple[Any, ...]


def outline_of(replica: StageReplica) -> Outline:
    """Classes of modules, types and ``requires_grad`` of parameters, sizes of parameter groups; no hooks."""
    parts: list[Any] = []
    for part in replica.module.modules():
        kept = part.__dict__
        parts.append(part.__class__)
        for name, parameter in kept["_parameters"].items():
            if parameter is None:
                parts.append(name)
                continue
            parts += (name, parameter.requires_grad, parameter.dtype)
    optimizer = replica.attributes["basic_optimizer"]
    parts += [len(group["params"]) for group in (() if optimizer is None else optimizer.param_groups)]
    return tuple(parts)
