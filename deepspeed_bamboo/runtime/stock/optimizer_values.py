"""What an optimizer or scheduler of the script's own class keeps beside its ``state_dict``: slow weights, a history.

It takes the same steps on a shadow, from the same gradients; so it goes with a stage's state, and not with each step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.held_fitting import Examples, Fitting
from deepspeed_bamboo.runtime.stock.held_values import Reader
from deepspeed_bamboo.runtime.stock.plain_forms import Form, Parts, device_of
from deepspeed_bamboo.runtime.stock.plain_values import PLAIN
from deepspeed_bamboo.runtime.stock.script_hooks import source_of

OptimizerState = dict[str, Any]
"""``nodes`` and ``tensors`` of a graph (``held_values.py``); ``where`` has for each root its name and item."""

_LIBRARIES = ("torch.", "deepspeed.")
_EVERY = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
_CODE = (types.FunctionType, types.MethodType, torch.optim.Optimizer, torch.nn.Module, type)


def unfollowed_hooks(optimizer: Any) -> list[str]:
    """What the script has put around the steps of an optimizer, which shadows' steps have not; as texts."""
    if optimizer is None:
        return []
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [hook for kind in kinds for hook in getattr(optimizer, kind, {}).values()]
    wrapped = vars(optimizer).get("step")
    if wrapped is not None and not hasattr(wrapped, "_wrapped_by_lr_sched"):
        hooks.append(wrapped)
    own = (hook for hook in hooks if not f"{source_of(hook)}.".startswith((*_LIBRARIES, "deepspeed_bamboo.")))
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in own]


def optimizer_values(holder: Any, module: torch.nn.Module) -> OptimizerState | None:
    """What can be sent of it, for a stage's ``module``; tensors are copies. None where there is nothing."""
    roots = list(_attributes(holder))
    if not roots:
        return None
    reader = Reader(_parts(holder, module))
    items: list[tuple[str, Form]] = [(name, reader.root(value)) for name, value in roots]
    where = [[name, item] for name, item in items if not reader.graph.unknown(item)]
    return {
        "nodes": reader.graph.nodes,
        "where": where,
        "tensors": [tensor.detach().clone() for tensor in reader.graph.tensors],
    }


def accept_optimizer_values(holder: Any, module: torch.nn.Module, state: OptimizerState | None) -> list[str]:
    """Inverse of :func:`optimizer_values`. Returns what can't be made here, each with the reason; it stays as it is."""
    if holder is None or state is None:
        return []
    parts = _parts(holder, module)
    reader = Reader(parts)
    for _, value in _attributes(holder):
        reader.root(value)
    examples = Examples(reader.objects)
    fitting = Fitting(state["nodes"], state["tensors"], parts=parts, examples=examples, device=device_of(module))
    problems = []
    for name, item in state["where"]:
        try:
            vars(holder)[name] = fitting.root(item, vars(holder).get(name))
        except LookupError as error:
            problems.append(f"{type(holder).__name__}.{name} ({error} can't be made on another worker)")
    return problems


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    if holder is None or f"{type(holder).__module__}.".startswith(_LIBRARIES):
        return
    for name, value in vars(holder).items():
        if name not in _EVERY and value.__class__ not in PLAIN and not isinstance(value, _CODE):
            yield name, value


def _parts(holder: Any, module: torch.nn.Module) -> Parts:
    """Of the module, with the tensors that the optimizer steps (which in half precision are others)."""
    parts = Parts.of(module)
    groups = getattr(holder, "param_groups", ())
    stepped = {
        f"optimizer.{g}.{p}": tensor for g, group in enumerate(groups) for p, tensor in enumerate(group["params"])
    }
    return parts.with_tensors(stepped)
