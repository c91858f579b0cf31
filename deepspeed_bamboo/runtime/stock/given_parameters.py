"""``model_parameters``: each stage of a worker trains its own part of them, and what is no stage's is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.description import grouped_parameters
from deepspeed_bamboo.runtime.stock.strangers import problem_with_strangers


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

        def named(item: Any) -> list[_Parameter]:
            said, parameter = item if isinstance(item, tuple) else (None, item)
            return [_Parameter(tuple(names.get(id(parameter), ())), said)]

        return cls(_mapped(given, named))

    def within(self, module: torch.nn.Module) -> list[Any]:
        """The same of the stage in ``module``. Groups that have nothing there are empty, so all stages have all."""
        tensors = dict(module.named_parameters(remove_duplicate=False))

        def found(item: _Parameter) -> list[Any]:
            here = [tensors[name] for name in item.names if name in tensors][:1]
            return here if item.said is None else [(item.said, parameter) for parameter in here]

        return _mapped(self.items, found)

    def left_in(self, module: torch.nn.Module, given: Iterable[Any]) -> list[Any]:
        """As :meth:`within`, in the groups that the script gave: it may keep them, and write into them later."""
        held = (item for item in given if isinstance(item, dict))
        left: list[Any] = []
        for item in self.within(module):
            if isinstance(item, dict):
                own = next(held)
                own.update(item)
                item = own
            left.append(item)
        return left


@dataclass(frozen=True)
class BuiltLayers:
    """The layers of a stage that are there before its replica is made.

    Args:
        fill: puts them into a module.
        given: what the script wants trained; None for all that is trainable.
    """

    fill: Callable[[Any], None]
    given: GivenParameters | None


def refuse_strangers(optimizer: Any, module: torch.nn.Module) -> None:
    """Raise ConfigError where the optimizer of the stage in ``module`` has parameters that belong to no stage."""
    trained = [parameter for group in grouped_parameters(optimizer) for parameter in group]
    problems = list(problem_with_strangers(trained, module, where="the optimizer"))
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True)
class _Parameter:
    names: tuple[str, ...]
    said: str | None  # the name that the script has passed with it


def _mapped(items: Iterable[Any], change: Callable[[Any], list[Any]]) -> list[Any]:
    """What ``change`` makes of each of ``items``, or of the lone one, and of those in groups."""
    mapped: list[Any] = []
    for item in [items] if isinstance(items, torch.Tensor) else items:
        mapped += [{**item, "params": _mapped(item["params"], change)}] if isinstance(item, dict) else change(item)
    return mapped
