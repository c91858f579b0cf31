"""The objects of which a scheduler consists, by the way to them.

SequentialLR, ChainedScheduler and others like them have schedulers inside; LambdaLR may have an object for each group.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.held_values import ATOMS

Way = tuple[Any, ...]
"""Attributes, positions in lists and keys of dictionaries."""
_LEAVES = (type, types.FunctionType, types.MethodType, types.ModuleType, functools.partial, torch.nn.Module)
_HOLDERS = (list, tuple, dict)


def parts_of(scheduler: Any) -> dict[Way, dict[str, Any]]:
    """The attributes of ``scheduler`` itself (at the way ()), and of all that are inside; {} for None."""
    found: dict[Way, dict[str, Any]] = {}
    seen: set[int] = set()
    waiting: list[tuple[Way, Any]] = [] if scheduler is None else [((), scheduler)]
    while waiting:
        way, value = waiting.pop()
        if not isinstance(value, _HOLDERS) and way and not _is_part(value):
            continue
        if id(value) not in seen:
            seen.add(id(value))
            if not isinstance(value, _HOLDERS):
                value = found[way] = vars(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*way, key), item) for key, item in items if item.__class__ not in ATOMS]
    return found


def is_saved(state: Any, way: Way, name: str) -> bool:
    """Whether a scheduler's ``state_dict`` has attribute ``name`` of the part at ``way``."""
    for step in way:
        if isinstance(state, (list, tuple)):
            state = dict(enumerate(state))
        if not isinstance(state, Mapping) or step not in state:
            return False
        state = state[step]
    return isinstance(state, Mapping) and name in state


def _is_part(value: Any) -> bool:
    """A scheduler, or what one calls; no optimizer, whose values are followed apart."""
    if isinstance(value, _LEAVES) or not hasattr(value, "__dict__") or hasattr(value, "param_groups"):
        return False
    return callable(value) or (hasattr(value, "step") and hasattr(value, "state_dict"))
