"""Layers of a replica that are parts of a model which other stages of this worker use, too, become its own.

A LayerSpec may get a model that every rank has whole, and take a part of it. Owners in different processes have copies
of their own; two stages of one worker must not share one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import torch

_HOOKS = tuple(name for name in torch.nn.Module().__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs")))


def separate(module: Any, *, taken: Container[int]) -> None:
    """Replace what is in ``taken``, ids of modules, parameters and buffers, in a stage's PipelineModule by copies.

    The copies have no values yet. What the stage itself uses twice stays one thing in it.
    """
    if not any(id(part) in taken for part in _parts(module)):
        return
    memo: dict[int, Any] = {}
    for name, child in list(module._modules.items()):
        if name == "tied_modules":
            for key, tied in list(child._modules.items()):
                child._modules[key] = _copied(tied, memo)
        elif name.isdigit() and child is not None:
            module._modules[name] = _copied(child, memo)
    module.forward_funcs = [_mapped(function, memo) for function in module.forward_funcs]


def ids_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of all that is in ``modules``."""
    return {id(part) for module in modules for part in _parts(module)}


def shell(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the same class with the same attributes, without children, parameters, buffers and hooks."""
    made: Any = module.__class__.__new__(module.__class__)
    made.__dict__.update(module.__dict__)
    made.__dict__.update(
        _modules={},
        _parameters={},
        _buffers={},
        _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
        **{name: type(module.__dict__[name])() for name in _HOOKS if name in module.__dict__},
    )
    return made  # type: ignore[no-any-return]


def _parts(module: torch.nn.Module) -> Iterable[Any]:
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    made = memo[id(module)] = shell(module)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copied(child, memo)
    for kind in ("_parameters", "_buffers"):
        for name, value in getattr(module, kind).items():
            getattr(made, kind)[name] = None if value is None else _blank(value, memo)
    for name in _HOOKS:
        if module.__dict__.get(name):
            made.__dict__[name].update({k: _mapped(v, memo) for k, v in module.__dict__[name].items()})
    for name, value in made.__dict__.items():
        if name not in _HOOKS and not name.startswith("_"):
            made.__dict__[name] = _mapped(value, memo)
    return made


def _blank(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(value) not in memo:
        made = torch.empty_like(value, requires_grad=False)
        if isinstance(value, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
            made.__dict__.update(value.__dict__)
        memo[id(value)] = made
    return memo[id(value)]  # type: ignore[no-any-return]


def _mapped(value: Any, memo: dict[int, Any]) -> Any:
    """``value`` with what has a copy replaced by that."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else memo.setdefault(id(value), value.clone())
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, memo) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, memo) for key, item in value.items()}
    if type(value) is partial:
        return partial(value.func, *(_mapped(a, memo) for a in value.args), **value.keywords)
    own = getattr(value, "__self__", None)
    if own is not None and id(own) in memo and hasattr(value, "__func__"):
        return value.__func__.__get__(memo[id(own)])
    return value
