"""What a stage is, as plain data: its modules, parameters, buffers, hooks and optimizer, by name.

The owner of a stage sends this to the worker that will hold a replica. That worker makes the replica alike
(``likeness.py``) and then describes it, too. Where the two descriptions differ, the replica is not what its owner is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_bamboo.runtime.comm.layout import layout_of
from deepspeed_bamboo.runtime.stock.hook_values import read_hooks
from deepspeed_bamboo.runtime.stock.hyperparameters import Values, values_of
from deepspeed_bamboo.runtime.stock.plain_forms import Form, Parts, class_name, form_of
from deepspeed_bamboo.runtime.stock.script_hooks import MODULE_HOOKS, hook_options, is_of_stage, source_of

Description = dict[str, Any]
"""``modules``, ``parameters``, ``buffers`` by name, ``forward`` in order, ``optimizer`` or None; ``held``: what hooks
keep, without tensors."""

EMPTY = ("_parameters", "_buffers", "_modules")
_MODULE_ATTRIBUTES = frozenset(torch.nn.Module().__dict__) | {"_is_full_backward_hook", "_external_params"}
_PARAMETER_ATTRIBUTES = frozenset(
    {"grad_accum", "model_parallel", "param_idx_in_group", "cpu_data", "_dp_group", "_index_in_param_group"}
    | {"_param_group_index", "_zero_optimizer"}
)


def describe(module: Any, optimizer: Any, *, made: Values = (), flags: dict[str, Any] | None = None) -> Description:
    """Of a stage's PipelineModule and its optimizer, which may be None.

    ``made``: what the optimizer's groups held when it was made. ``flags``: of the engine, for this stage.
    """
    parts = Parts.of(module)
    reading = read_hooks(module, parts)
    hooks = {} if reading is None else reading.signatures()
    names = {id(value): name for name, value in module.named_parameters()}
    return {
        "modules": {
            path: _module(part, parts, hooks.get(path, {}))
            for path, part in parts.modules.items()
            if is_of_stage(module, path)
        },
        "parameters": {
            name: _parameter(value, parts, hooks.get(names.get(id(value), name), {}))
            for name, value in _named(module, "_parameters")
        },
        "buffers": {name: _buffer(value, module, name) for name, value in _named(module, "_buffers")},
        "forward": [form_of(function, parts) for function in module.forward_funcs],
        "optimizer": None if optimizer is None else _optimizer(optimizer, parts, made),
        "flags": flags or {},
        "held": None if reading is None else reading.state(tensors=None),
    }


@functools.cache
def is_foreign(name: str) -> bool:
    """Whether an attribute of a module is none of its own: every module has it, or another one on another machine."""
    return _is_foreign(name, _MODULE_ATTRIBUTES)


def is_torchs(name: str) -> bool:
    """Whether every module has an attribute of this name, or DeepSpeed notes it there."""
    return name in _MODULE_ATTRIBUTES


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """What a module has besides what every module has; not what may be another thing on another machine."""
    return {name: value for name, value in module.__dict__.items() if not is_foreign(name)}


def noted_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What the script has noted on a parameter."""
    return {
        name: value
        for name, value in parameter.__dict__.items()
        if not _is_foreign(name, _PARAMETER_ATTRIBUTES) and not source_of(value).startswith("deepspeed.")
    }


def _is_foreign(name: str, known: frozenset[str]) -> bool:
    return name in known or name.startswith(("ds_", "_ds_", "_hp_")) or "rank" in name or "device" in name


def _named(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All of one kind by name, also those that are there under another name before."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in getattr(part, kind).items():
            if value is not None:
                yield (f"{path}.{name}" if path else name), value


def _module(part: torch.nn.Module, parts: Parts, hooks: dict[str, list[Form]]) -> dict[str, Any]:
    return {
        "class": class_name(type(part)),
        "children": {name: parts.path(child) for name, child in part._modules.items() if child is not None},
        "empty": {kind: names for kind in EMPTY if (names := [n for n, v in getattr(part, kind).items() if v is None])},
        "attributes": {name: form_of(value, parts) for name, value in own_attributes(part).items()},
        "hooks": hooks,
        "options of hooks": {kind: its for kind in MODULE_HOOKS if any(its := hook_options(part, kind))},
    }


def _parameter(value: torch.Tensor, parts: Parts, hooks: dict[str, list[Form]]) -> dict[str, Any]:
    return {
        "class": class_name(type(value)),
        "same as": parts.name(value),
        "shape": list(value.shape),
        "strides": layout_of(value),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
        "attributes": {name: form_of(item, parts) for name, item in noted_attributes(value).items()},
        "hooks": hooks,
    }


def _buffer(value: torch.Tensor, module: torch.nn.Module, name: str) -> dict[str, Any]:
    path, _, last = name.rpartition(".")
    kept = last not in module.get_submodule(path)._non_persistent_buffers_set
    return {
        "shape": list(value.shape),
        "strides": layout_of(value),
        "dtype": value.dtype,
        "persistent": kept,
    }


# ---- optimizers --------------------------------------------------------------------------------------


@singledispatch
def grouped_parameters(optimizer: Any) -> list[list[torch.Tensor]]:
    """The model's parameters in each group of an optimizer, DeepSpeed's wrappers included."""
    return [list(group["params"]) for group in optimizer.param_groups]


@grouped_parameters.register
def _(optimizer: BF16_Optimizer) -> list[list[torch.Tensor]]:
    return [list(group) for group in optimizer.bf16_groups]


@grouped_parameters.register(FP16_Optimizer)
@grouped_parameters.register(FP16_UnfusedOptimizer)
def _(optimizer: Any) -> list[list[torch.Tensor]]:
    return [list(group) for group in optimizer.fp16_groups]


@grouped_parameters.register
def _(optimizer: DeepSpeedZeroOptimizer) -> list[list[torch.Tensor]]:
    return [list(group) for group in optimizer.bit16_groups]


def basic_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside of DeepSpeed's wrappers."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def _optimizer(optimizer: Any, parts: Parts, made: Values) -> dict[str, Any]:
    basic = basic_optimizer(optimizer)
    values = made if len(made) == len(basic.param_groups) else values_of(basic)
    return {
        "class": class_name(type(basic)),
        "wrapper": class_name(type(optimizer)),
        "defaults": {name: form_of(value, parts) for name, value in _defaults(basic).items()},
        "groups": [[parts.name(parameter) for parameter in group] for group in grouped_parameters(optimizer)],
        "made": [{name: form_of(value, parts) for name, value in group.items()} for group in values],
    }


def _defaults(basic: Any) -> dict[str, Any]:
    """torch adds ``differentiable`` to what it loads; an optimizer that was only made may lack it."""
    return {"differentiable": False, **getattr(basic, "defaults", {})}
