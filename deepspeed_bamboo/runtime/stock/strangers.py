"""Parameters that a script has trained, and that are not its PipelineModule's: a loss with weights in a closure, say.

DeepSpeed trains them on the rank that uses them. Here nobody else could: they belong to no stage, so they are neither
with the stages that a worker gets nor in shadows and checkpoints. So they are refused. Parameters of other stages'
layers, which a script has where every rank makes the whole model, are no strangers: their own stage trains them.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

from deepspeed_bamboo.runtime.stock.plain_forms import cell_contents

_MOST_SHAPES = 8


def strangers(given: Iterable[Any], module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Those of ``given`` (as ``model_parameters`` has them) that no stage of ``module`` trains, and stock would."""
    own = {id(parameter) for parameter in module.parameters()}
    others = [its for its in _flat(given) if id(its) not in own and its.requires_grad]
    if others:
        of_layers = _in_specs(module)
        yield from (its for its in others if id(its) not in of_layers)


def problem_with_strangers(given: Iterable[Any], module: torch.nn.Module, *, where: str) -> Iterator[str]:
    """Why what was ``given`` at ``where`` can't be trained, with what to do."""
    found = Counter(str(tuple(its.shape)) for its in strangers(given, module))
    if found:
        shapes = [shape if count == 1 else f"{count} x {shape}" for shape, count in found.items()]
        more = [f"{len(shapes) - _MOST_SHAPES} more"] if len(shapes) > _MOST_SHAPES else []
        yield (
            f"{where} has {found.total()} parameters that are not the PipelineModule's, of shape "
            f"{', '.join([*shapes[:_MOST_SHAPES], *more])}: they belong to no stage, so no other worker could train "
            "them, and no checkpoint has them. Make them part of a layer, pass the nn.Module that has them as loss_fn "
            "of the PipelineModule, or register them there as Parameters, before you pass module.parameters()"
        )


def listed(given: Any) -> Any:
    """``given`` with lists in the place of generators, so that it can be read again; groups stay the script's own."""
    if isinstance(given, torch.Tensor):
        return given
    items = given if isinstance(given, list) else list(given)
    for item in items:
        if isinstance(item, dict) and not isinstance(item.get("params", ()), (list, tuple, torch.Tensor)):
            item["params"] = list(item["params"])
    return items


def _flat(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in [given] if isinstance(given, torch.Tensor) else given:
        if isinstance(item, dict):
            yield from _flat(item.get("params", ()))
        else:
            parameter = item[1] if isinstance(item, tuple) else item
            if isinstance(parameter, torch.Tensor):
                yield parameter


def _in_specs(module: Any) -> set[int]:
    """The ids of parameters from which layers are made: ready-made modules, and what LayerSpecs are called with."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting: list[Any] = []
    for spec in getattr(module, "_layer_specs", ()):
        if isinstance(spec, LayerSpec):
            # A forward_fn only uses what a layer has; so does a function in the list, or it is a stranger's.
            waiting += [spec.module_args, spec.module_kwargs]
        elif isinstance(spec, torch.nn.Module):
            waiting.append(spec)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(id(value))
        elif isinstance(value, torch.nn.Module):
            found.update(map(id, value.parameters()))
        else:
            waiting += _parts(value)
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return (*map(cell_contents, value.__closure__ or ()), *(value.__defaults__ or ()))
    return ()
