"""Makes what a PipelineModule keeps of itself (a bound method, mostly) belong to a replica of it.

A subclass whose loss is one of its own methods keeps results on the module. After a loss, on the worker that computes
the last stage, this must be the module of that stage.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

_MOST_LEVELS = 8


def rebound(value: Any, *, old: torch.nn.Module, new: torch.nn.Module, levels: int = _MOST_LEVELS) -> Any:
    """``value`` with every reference to ``old`` in it replaced by ``new``; the same object where there is none.

    Looks into bound methods, partials, functions that were made inside others, lists, tuples, dicts and LayerSpecs.
    """
    if value is old:
        return new
    if levels == 0 or isinstance(value, (torch.nn.Module, torch.Tensor)):
        return value

    def inner(part: Any) -> Any:
        return rebound(part, old=old, new=new, levels=levels - 1)

    if isinstance(value, types.MethodType):
        owner = inner(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        return _partial(value, inner)
    if isinstance(value, types.FunctionType):
        return _function(value, inner)
    if isinstance(value, (list, tuple, dict)):
        return _container(value, inner)
    if isinstance(value, LayerSpec):
        return _spec(value, inner)
    return value


def own_beside_layers(module: torch.nn.Module) -> torch.nn.Module:
    """A Module that a PipelineModule has besides its layers, for another stage: of its own where it has state."""
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    return copy.deepcopy(module) if has_state else module


def _partial(value: Any, inner: Any) -> Any:
    parts = (inner(value.func), _container(value.args, inner), _container(value.keywords, inner))
    if parts[0] is value.func and parts[1] is value.args and parts[2] is value.keywords:
        return value
    return functools.partial(parts[0], *parts[1], **parts[2])


def _function(value: types.FunctionType, inner: Any) -> Any:
    """A function like ``value`` with other contents in its closure."""
    cells = value.__closure__ or ()
    contents = [_content(cell) for cell in cells]
    replaced = [inner(content) for content in contents]
    if all(new is old for new, old in zip(replaced, contents, strict=True)):
        return value
    made = types.FunctionType(
        value.__code__,
        value.__globals__,
        value.__name__,
        value.__defaults__,
        tuple(
            cell if new is old else types.CellType(new)
            for cell, new, old in zip(cells, replaced, contents, strict=True)
        ),
    )
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is still to be given a value
        return None


def _container(value: Any, inner: Any) -> Any:
    if isinstance(value, dict):
        found = {key: inner(part) for key, part in value.items()}
        if all(found[key] is part for key, part in value.items()):
            return value
        made = copy.copy(value)
        made.update(found)
        return made
    parts = [inner(part) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _spec(value: LayerSpec, inner: Any) -> Any:
    found = {name: inner(part) for name, part in vars(value).items()}
    if all(found[name] is part for name, part in vars(value).items()):
        return value
    made = copy.copy(value)
    made.__dict__.update(found)
    return made
