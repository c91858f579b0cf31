"""Numbers and texts in global variables of the script's modules, as they were before a step.

A loss function or a layer may read one that the script sets before each step (``for step in range(n)`` at the top of a
script makes one). Where steps are done again, on the way back to a checkpoint, they must find what they found then.
Every worker's script sets its own, so nothing is sent.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.pipe import LayerSpec

from deepspeed_bamboo.runtime.stock.held_values import global_names, is_of_a_library

GlobalValues = Mapping[str, Mapping[str, Any]]
"""By module and name."""

_KINDS = frozenset({type(None), bool, int, float, complex, str})


def globals_now(stages: Iterable[Any]) -> GlobalValues:
    """Of the modules that have the layers and the loss function of ``stages``, and that functions there name."""
    found = {}
    for module in dict.fromkeys(name for stage in stages for name in _modules_of(stage)):
        variables = vars(sys.modules[module]) if module in sys.modules else {}
        named = (name for code in _code_of(module, variables) for name in global_names(code))
        names = [name for name in dict.fromkeys(named) if not name.startswith("__")]
        its = {name: variables[name] for name in names if variables.get(name, ...).__class__ in _KINDS}
        if its:
            found[module] = its
    return found


@contextmanager
def globals_again(values: GlobalValues) -> Iterator[None]:
    """Inside, global variables are what they were; then they are again what they are now."""
    today = []
    for module, its in values.items():
        variables = vars(sys.modules[module]) if module in sys.modules else {}
        for name, value in its.items():
            if name in variables and (variables[name].__class__, variables[name]) != (value.__class__, value):
                today.append((variables, name, variables[name]))
                variables[name] = value
    try:
        yield
    finally:
        for variables, name, value in today:
            variables[name] = value


def _modules_of(stage: Any) -> Iterator[str]:
    """Layers of other stages too: who goes back may get any of them."""
    kinds = list(dict.fromkeys(type(part) for part in stage.modules()))  # in each step: a stage has many of few kinds
    specs = [spec for spec in getattr(stage, "_layer_specs", ()) if not isinstance(spec, type)]
    kinds += [getattr(spec, "typename", spec) if isinstance(spec, LayerSpec) else spec for spec in specs]
    for kind in (*kinds, getattr(stage, "loss_fn", None)):
        its = kind.func if isinstance(kind, functools.partial) else getattr(kind, "__func__", kind)
        name = getattr(its, "__module__", None)
        if isinstance(name, str) and not is_of_a_library(name):
            yield name


def _code_of(module: str, variables: Mapping[str, Any]) -> Iterator[types.CodeType]:
    for value in list(variables.values()):
        if getattr(value, "__module__", None) != module:
            continue
        for held in list(vars(value).values()) if isinstance(value, type) else [value]:
            function = getattr(held, "__func__", getattr(held, "__wrapped__", held))
            if isinstance(function, types.FunctionType):
                yield function.__code__
