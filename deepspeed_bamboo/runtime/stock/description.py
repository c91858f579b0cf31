"""What a stage is, as plain data: its modules, parameters, buffers, hooks and optimizer, by name.

The owner of a stage sends this to the worker that will hold a replica. That worker makes the replica alike
(``likeness.py``) and then describes it, too. Where the two descriptions differ, the replica is not what its owner is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_bamboo.runtime.stock.hyperparameters import Values, values_of
from deepspeed_bamboo.runtime.stock.plain_forms import Form, Parts, class_name, form_of

Description = dict[str, Any]
"""``modules``, ``parameters``, ``buffers`` by name, ``forward`` in order, ``optimizer`` or None."""

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Options of hooks, and where torch notes them.
_OPTIONS = {
    "_forward_hooks": {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"},
    "_forward_pre_hooks": {"with_kwargs": "_forward_pre_hooks_with_kwargs"},
}
EMPTY = ("_parameters", "_buffers", "_modules")
# DeepSpeed's and this package's own hooks and attributes come with the engine, on every replica.
_NOT_THE_SCRIPTS = ("deepspeed.", "deepspeed_bamboo.runtime", "torch.")
# ... unlike those by which torch has a script change a layer: pruning, weight norm.
_BY_THE_SCRIPT = ("torch.nn.utils.",)
LOSS = "loss_fn"
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
    return {
        "modules": {path: _module(part, parts) for path, part in parts.modules.items() if is_of_stage(module, path)},
        "parameters": {name: _parameter(value, parts) for name, value in _named(module, "_parameters")},
        "buffers": {name: _buffer(value, module, name) for name, value in _named(module, "_buffers")},
        "forward": [form_of(function, parts) for function in module.forward_funcs],
        "optimizer": None if optimizer is None else _optimizer(optimizer, parts, made),
        "flags": flags or {},
    }


def is_of_stage(module: torch.nn.Module, path: str) -> bool:
    """Whether what is at ``path`` of a stage's PipelineModule belongs to that stage.

    All stages of a worker have one loss function, which only the last stage of a pipeline calls.
    """
    last = getattr(module, "stage_id", None) == getattr(module, "num_stages", 0) - 1
    return bool(path) and (last or path.partition(".")[0] != LOSS)


@functools.cache
def is_foreign(name: str) -> bool:
    """Whether an attribute of a module is none of its own: every module has it, or another one on another machine."""
    return _is_foreign(name, _MODULE_ATTRIBUTES)


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """What a module has besides what every module has; not what may be another thing on another machine."""
    return {name: value for name, value in module.__dict__.items() if not is_foreign(name)}


def noted_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What the script has noted on a parameter."""
    return {
        name: value
        for name, value in parameter.__dict__.items()
        if not _is_foreign(name, _PARAMETER_ATTRIBUTES) and not _source(value).startswith("deepspeed.")
    }


def hooks_of(holder: Any, kind: str) -> list[Any]:
    """The hooks of one kind that the script, or a layer's class, has registered, in order."""
    registered = getattr(holder, kind, None)
    return [hook for hook in (registered or {}).values() if not _is_not_the_scripts(hook)]


def hook_options(holder: Any, kind: str) -> list[dict[str, bool]]:
    """The options with which the hooks of :func:`hooks_of` were registered, in their order; none for the default."""
    registered = getattr(holder, kind, None) or {}
    given = {option: getattr(holder, where) for option, where in _OPTIONS.get(kind, {}).items()}
    return [
        {option: True for option, keys in given.items() if key in keys}
        for key, hook in registered.items()
        if not _is_not_the_scripts(hook)
    ]


def _is_foreign(name: str, known: frozenset[str]) -> bool:
    return name in known or name.startswith(("ds_", "_ds_", "_hp_")) or "rank" in name or "device" in name


def _is_not_the_scripts(hook: Any) -> bool:
    source = _source(hook)
    return source.startswith(_NOT_THE_SCRIPTS) and not source.startswith(_BY_THE_SCRIPT)


def _source(value: Any) -> str:
    """The module that a function is from, or the class of anything else."""
    function = value.__func__ if isinstance(value, types.MethodType) else getattr(value, "func", value)
    return str(getattr(function, "__module__", None) or type(value).__module__)


def _named(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All of one kind by name, also those that are there under another name before."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in getattr(part, kind).items():
            if value is not None:
                yield (f"{path}.{name}" if path else name), value


def _module(part: torch.nn.Module, parts: Parts) -> dict[str, Any]:
    return {
        "class": class_name(type(part)),
        "children": {name: parts.path(child) for name, child in part._modules.items() if child is not None},
        "empty": {kind: names for kind in EMPTY if (names := [n for n, v in getattr(part, kind).items() if v is None])},
        "attributes": {name: form_of(value, parts) for name, value in own_attributes(part).items()},
        "hooks": {
            kind: [form_of(hook, parts) for hook in hooks] for kind in MODULE_HOOKS if (hooks := hooks_of(part, kind))
        },
        "options of hooks": {kind: its for kind in MODULE_HOOKS if any(its := hook_options(part, kind))},
    }


def _parameter(value: torch.Tensor, parts: Parts) -> dict[str, Any]:
    return {
        "class": class_name(type(value)),
        "same as": parts.name(value),
        "shape": list(value.shape),
        "dtype": value.dtype,
        "requires_grad": value.requires_grad,
        "attributes": {name: form_of(item, parts) for name, item in noted_attributes(value).items()},
        "hooks": {
            kind: [form_of(hook, parts) for hook in hooks]
            for kind in PARAMETER_HOOKS
            if (hooks := hooks_of(value, kind))
        },
    }


def _buffer(value: torch.Tensor, module: torch.nn.Module, name: str) -> dict[str, Any]:
    path, _, last = name.rpartition(".")
    kept = last not in module.get_submodule(path)._non_persistent_buffers_set
    return {"shape": list(value.shape), "dtype": value.dtype, "persistent": kept}


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


def function_forms(description: Description) -> Iterator[Form]:
    """Every hook in a description."""
    for part in (*description["modules"].values(), *description["parameters"].values()):
        for hooks in part["hooks"].values():
            yield from hooks
