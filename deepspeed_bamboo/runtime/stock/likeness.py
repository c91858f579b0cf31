"""Makes a stage that was built from its LayerSpecs what its owner is, by the owner's description.

What the description says in full is made accordingly: shapes, types, ``requires_grad``, attributes with plain values,
hooks whose code this process has. A module of another class than its LayerSpec's (an adapter around a layer) is
made like one of that class in this worker's own stages, where the same script has done the same; or from the class
alone, if the description says everything about it. What can't be made shows when the result is described
(``core/replica_differences.py``).
"""

from __future__ import annotations

import copy
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_bamboo.runtime.comm.layout import in_layout
from deepspeed_bamboo.runtime.stock.description import EMPTY, Description, noted_attributes, own_attributes
from deepspeed_bamboo.runtime.stock.held_values import CONTAINERS, MAPPINGS, own_generator
from deepspeed_bamboo.runtime.stock.hook_values import examples_of, made_hooks
from deepspeed_bamboo.runtime.stock.plain_forms import (
    CodeOfTheScript,
    Form,
    Parts,
    class_name,
    form_of,
    is_known,
    value_of,
)
from deepspeed_bamboo.runtime.stock.script_hooks import MODULE_HOOKS, PARAMETER_HOOKS, hook_options, hooks_of
from deepspeed_bamboo.runtime.stock.separate import shell

REGISTER = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_REGISTER_ON_MODULE = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}


def liken(module: Any, description: Description, *, examples: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Make ``module``, a PipelineModule as built from its specs, like the one described.

    ``examples``: the PipelineModules that this worker has. Values of parameters and buffers come later.
    """
    owns = list(examples)
    Structure(module, description, owns).fit()
    _fit_tensors(module, description, device)
    code = CodeOfTheScript(function for own in owns for function in _functions(own))
    parts = Parts.of(module)
    others = _by_class(owns)
    held = description["held"]
    examples_too = [*owns, module]
    hooks = {} if held is None else made_hooks(held, parts=parts, examples=examples_of(examples_too), device=device)
    for path, has in description["modules"].items():
        part = parts.modules.get(path)
        if part is not None:
            _fit_attributes(part, has["attributes"], own_attributes(part), others.get(has["class"], ()), parts, code)
            fit = HookFitting(path, hooks, options=has["options of hooks"])
            fit.fit(part, MODULE_HOOKS, _REGISTER_ON_MODULE)
    HookFitting("", hooks, options={kind: hook_options(module, kind) for kind in MODULE_HOOKS}).fit(
        module, MODULE_HOOKS, _REGISTER_ON_MODULE
    )
    alike = [parameter for own in owns for parameter in own.parameters()]
    for name, has in description["parameters"].items():
        parameter = parts.tensors.get(name)
        if parameter is not None:
            _fit_attributes(parameter, has["attributes"], noted_attributes(parameter), alike, parts, code)
            HookFitting(name, hooks).fit(parameter, PARAMETER_HOOKS, REGISTER)
    for index, form in enumerate(description["forward"]):
        if index < len(module.forward_funcs) and repr(form_of(module.forward_funcs[index], parts)) != repr(form):
            module.forward_funcs[index] = _made(form, parts, code, module.forward_funcs[index])


def take_root_hooks(module: Any, template: Any) -> None:
    """Give ``module`` the script's hooks on ``template``, another stage's PipelineModule, itself.

    The script registers them on its one module, in every process alike.
    """
    for kind in MODULE_HOOKS:
        for hook, options in zip(hooks_of(template, kind), hook_options(template, kind), strict=True):
            register_on_module(module, kind, hook, options)


def register_on_module(module: Any, kind: str, hook: Any, options: Mapping[str, bool]) -> None:
    """Register ``hook`` of this ``kind`` with its ``options``."""
    _register(module, _REGISTER_ON_MODULE[kind], hook, options)


def lay_out(module: Any, description: Description) -> None:
    """Make the parameters and buffers of ``module`` lie in memory as the description says; shapes are right already.

    After DeepSpeed has taken the module, which can't broadcast parameters of unusual strides, and before there is an
    optimizer.
    """
    for tensors, wanted in (
        (module.named_parameters(), description["parameters"]),
        (module.named_buffers(), description["buffers"]),
    ):
        for name, tensor in tensors:
            if name in wanted and list(tensor.shape) == wanted[name]["shape"]:
                tensor.data = in_layout(tensor.data, wanted[name]["strides"])


class Structure:
    """The modules of a stage: classes and children."""

    def __init__(self, module: Any, description: Description, examples: list[torch.nn.Module]) -> None:
        self._root = module
        self._wanted = description["modules"]
        self._examples = _by_class(examples)
        self._placed: dict[str, torch.nn.Module] = {}

    def fit(self) -> None:
        """Put modules of the owner's classes in their places."""
        for path in self._wanted:
            if path.count(".") == path.startswith("tied_modules.") and path != "tied_modules":
                parent, _, name = path.rpartition(".")
                holder = self._root.get_submodule(parent)
                self._place(holder, name, path, displaced=None)

    def _place(
        self, holder: torch.nn.Module, name: str, path: str, *, displaced: torch.nn.Module | None, owned: bool = True
    ) -> None:
        """``owned``: what is there now belongs to this replica, and to no example."""
        if path in self._placed:
            holder._modules[name] = self._placed[path]
            return
        has, current = self._wanted[path], holder._modules.get(name)
        if not _is(current, has):
            fits = displaced if _is(displaced, has) and displaced not in self._placed.values() else None
            made = fits or self._make(has)
            if made is None:
                return
            owned, displaced = made is fits, current if owned else displaced
            current = made
        elif not owned and current is not None:
            current = shell(current)
        if current is None:
            return
        self._placed[path] = holder._modules[name] = current
        for child, place in has["children"].items():
            self._place(current, child, place, displaced=displaced, owned=owned)
        for child in [child for child in current._modules if child not in has["children"]]:
            del current._modules[child]
        for kind in EMPTY:
            for empty in has["empty"].get(kind, ()):
                getattr(current, kind)[empty] = None

    def _make(self, has: dict[str, Any]) -> torch.nn.Module | None:
        """A module of the class that ``has`` says, without parameters; its children may be an example's."""
        for example in self._examples.get(has["class"], ()):
            made = shell(example)
            made._modules.update(example._modules)
            return made
        kind = _class(has["class"])
        if kind is None or not all(is_known(form) for form in has["attributes"].values()):
            return None
        bare: torch.nn.Module = kind.__new__(kind)
        torch.nn.Module.__init__(bare)
        return bare


def _is(module: torch.nn.Module | None, has: dict[str, Any]) -> bool:
    return module is not None and class_name(type(module)) == has["class"]


def _class(name: str) -> Any:
    """The class of modules of this name, if this process has it."""
    where, _, last = name.rpartition(".")
    kind = getattr(sys.modules.get(where), last, None)
    return kind if isinstance(kind, type) and issubclass(kind, torch.nn.Module) else None


def _by_class(examples: Iterable[torch.nn.Module]) -> dict[str, list[torch.nn.Module]]:
    found: dict[str, list[torch.nn.Module]] = {}
    for example in examples:
        for path, part in example.named_modules():
            if path:
                found.setdefault(class_name(type(part)), []).append(part)
    return found


def _functions(module: torch.nn.Module) -> list[types.FunctionType]:
    holders = [
        *((part, kind) for part in module.modules() for kind in MODULE_HOOKS),
        *((parameter, kind) for parameter in module.parameters() for kind in PARAMETER_HOOKS),
    ]
    hooks = [hook for holder, kind in holders for hook in hooks_of(holder, kind)]
    values = [value for part in module.modules() for value in part.__dict__.values()]
    return [function for function in (*hooks, *values) if isinstance(function, types.FunctionType)]


# ---- parameters and buffers ---------------------------------------------------------------------------


def _fit_tensors(module: torch.nn.Module, description: Description, device: torch.device) -> None:
    made: dict[str, torch.Tensor] = {}
    for kind, wanted in (("_parameters", description["parameters"]), ("_buffers", description["buffers"])):
        for path, part in list(module.named_modules(remove_duplicate=False)):
            held = getattr(part, kind)
            for last in [last for last, value in held.items() if value is not None]:
                if (f"{path}.{last}" if path else last) not in wanted:
                    del held[last]
        for name, has in wanted.items():
            holder, last = _holder(module, name)
            if holder is None:
                continue
            held = getattr(holder, kind)
            if has.get("same as", name) in made:
                held[last] = made[has["same as"]]
                continue
            if kind == "_parameters":
                held[last] = _parameter(held.get(last), has, device, known=made.values())
            else:
                held[last] = _tensor(held.get(last), has, device)
                (holder._non_persistent_buffers_set.discard if has["persistent"] else _add(holder))(last)
            made[name] = held[last]


def _holder(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module | None, str]:
    path, _, last = name.rpartition(".")
    try:
        return module.get_submodule(path), last
    except AttributeError:
        return None, last


def _add(holder: torch.nn.Module) -> Any:
    return holder._non_persistent_buffers_set.add


def _tensor(value: torch.Tensor | None, has: dict[str, Any], device: torch.device) -> torch.Tensor:
    if value is None or list(value.shape) != has["shape"]:
        return torch.empty(has["shape"], dtype=has["dtype"], device=device)
    return value if value.dtype == has["dtype"] else value.to(has["dtype"])


def _parameter(value: Any, has: dict[str, Any], device: torch.device, *, known: Iterable[torch.Tensor]) -> Any:
    plain = has["class"] == class_name(torch.nn.Parameter)
    fits = value is not None and list(value.shape) == has["shape"] and class_name(type(value)) == has["class"]
    if plain and (not fits or any(value is other for other in known)):
        value = torch.nn.Parameter(_tensor(None, has, device), requires_grad=False)
    if value is None:
        raise LookupError(f"a parameter of class {has['class']} can't be made here")
    if value.dtype != has["dtype"]:
        value.data = value.data.to(has["dtype"])
    if value.requires_grad != has["requires_grad"]:
        value.requires_grad_(has["requires_grad"])
    return value


# ---- attributes and hooks -----------------------------------------------------------------------------


def _fit_attributes(
    holder: Any,
    wanted: dict[str, Form],
    held: dict[str, Any],
    examples: Iterable[Any],
    parts: Parts,
    code: CodeOfTheScript,
) -> None:
    for name in held:
        if name not in wanted:
            del holder.__dict__[name]
    for name, form in wanted.items():
        if name in held and repr(form_of(held[name], parts)) == repr(form):
            continue
        if is_known(form):
            holder.__dict__[name] = _made(form, parts, code, held.get(name))
            continue
        for example in examples:
            if name in example.__dict__ and repr(form_of(example.__dict__[name], parts)) == repr(form):
                holder.__dict__[name] = _own(example.__dict__[name])
                break


def _own(value: Any) -> Any:
    """``value`` of an example for another stage: data is copied, and gets the owner's values later."""
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind in MAPPINGS.values():
        made = copy.copy(value)
        dict.update(made, {key: _own(its) for key, its in value.items()})
        return made
    if kind is deque:
        return deque(map(_own, value), value.maxlen)
    if kind in CONTAINERS.values():
        return kind(map(_own, value))
    return value.copy() if isinstance(value, np.ndarray) else own_generator(value)


def _made(form: Form, parts: Parts, code: CodeOfTheScript, otherwise: Any) -> Any:
    try:
        return value_of(form, parts, code)
    except LookupError:
        return otherwise


class HookFitting:
    """The hooks of one module or parameter.

    Args:
        path: its.
        made: new hooks by path and kind, None where one could not be made.
        options: of the owner's hooks, by kind.
    """

    def __init__(
        self,
        path: str,
        made: Mapping[tuple[str, str], list[Any]],
        *,
        options: Mapping[str, list[dict[str, bool]]] = types.MappingProxyType({}),
    ) -> None:
        self._path, self._made, self._options = path, made, options

    def fit(self, holder: Any, kinds: Iterable[str], register: Mapping[str, str]) -> None:
        """Give ``holder`` the hooks; those that can't be made stay what they are, if there are as many."""
        for kind in kinds:
            made = self._made.get((self._path, kind), [])
            registered = getattr(holder, kind, None) or {}
            own = hooks_of(holder, kind)
            keys = [key for key, hook in registered.items() if any(hook is one for one in own)]
            given = self._options.get(kind) or [{} for _ in made]
            if len(keys) == len(made) and hook_options(holder, kind) == given:
                registered.update({key: hook for key, hook in zip(keys, made, strict=True) if hook is not None})
                continue
            for key in keys:
                del registered[key]
            for hook, its in zip(made, given, strict=True):
                if hook is not None:
                    _register(holder, register[kind], hook, its)


def _register(holder: Any, method: str, hook: Any, options: Mapping[str, bool]) -> None:
    frozen = isinstance(holder, torch.Tensor) and not holder.requires_grad
    if frozen:
        holder.requires_grad_(True)  # torch registers none on what has no gradient; the script froze it later
    getattr(holder, method)(hook, **options)
    if frozen:
        holder.requires_grad_(False)
