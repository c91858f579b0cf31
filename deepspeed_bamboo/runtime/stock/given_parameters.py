"""``model_parameters`` of a worker that begins with several stages: each stage trains its own part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GivenParameters:
    """What a script gave ``initialize``, by name, since stages may get copies of the parameters that it holds.

    Args:
        items: for each parameter its names in the module of all stages, or a group: its values, and ``params`` such
            items again.
    """

    items: Sequence[Any]

    @classmethod
    def of(cls, given: Iterable[Any], module: torch.nn.Module) -> GivenParameters:
        """``given``, which is read once: parameters, pairs of a name and a parameter, or groups of them."""
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return cls(_named(given, names))

    def within(self, module: torch.nn.Module) -> list[Any]:
        """The same of the stage in ``module``. Groups that have nothing there are empty, so all stages have all."""
        tensors = dict(module.named_parameters(remove_duplicate=False))
        return _found(self.items, tensors)


@dataclass(frozen=True)
class BuiltLayers:
    """The layers of a stage that are there before its replica is made.

    Args:
        fill: puts them into a module.
        given: what the script wants trained; None for all that is trainable.
    """

    fill: Callable[[Any], None]
    given: GivenParameters | None


@dataclass(frozen=True)
class _Parameter:
    names: tuple[str, ...]
    said: str | None  # the name that the script has passed with it


def _named(given: Iterable[Any], names: Mapping[int, Sequence[str]]) -> list[Any]:
    items: list[Any] = []
    for item in [given] if isinstance(given, torch.Tensor) else given:
        if isinstance(item, dict):
            items.append({**item, "params": _named(item["params"], names)})
            continue
        said, parameter = item if isinstance(item, tuple) else (None, item)
        items.append(_Parameter(tuple(names.get(id(parameter), ())), said))
    return items


def _found(items: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            found.append({**item, "params": _found(item["params"], tensors)})
            continue
        parameter = next((tensors[name] for name in item.names if name in tensors), None)
        if parameter is not None:
            found.append(parameter if item.said is None else (item.said, parameter))
    return found
