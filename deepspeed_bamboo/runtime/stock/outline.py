"""What a stage is in outline: cheap enough to look at before every step, and enough to see that a script changed it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from deepspeed_bamboo.runtime.stock.description import MODULE_HOOKS, PARAMETER_HOOKS
from deepspeed_bamboo.runtime.stock.plain_forms import class_name
from deepspeed_bamboo.runtime.stock.replica import StageReplica

Outline = tuple[Hashable, ...]


def outline_of(replica: StageReplica) -> Outline:
    """Classes of modules, hooks by the name of their code, types and ``requires_grad``, sizes of parameter groups.

    Equal for a hook that the script removes and registers again.
    """
    parts: list[Hashable] = []
    for path, part in replica.module.named_modules():
        parts += (path, class_name(type(part)), *_hooks(part, MODULE_HOOKS))
    for name, parameter in replica.module.named_parameters():
        parts += (name, parameter.requires_grad, parameter.dtype, *_hooks(parameter, PARAMETER_HOOKS))
    optimizer = replica.attributes["basic_optimizer"]
    parts += (len(group["params"]) for group in (() if optimizer is None else optimizer.param_groups))
    return tuple(parts)


def _hooks(holder: Any, kinds: tuple[str, ...]) -> Iterator[Hashable]:
    for kind in kinds:
        registered = getattr(holder, kind, None)
        if registered:  # hardly any has one
            yield kind
            for hook in registered.values():
                yield getattr(hook, "__qualname__", None) or class_name(type(hook))
