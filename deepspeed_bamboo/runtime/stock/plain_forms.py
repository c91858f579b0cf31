"""Python values of a stage in a form that can be sent and compared: what they are, and how they refer to the stage.

A form is plain data:

- ``["plain", value]``: a number, a text and the like, or a list, tuple or dict of such;
- ``["module", path]``, ``["parameter", name]``: parts of the stage;
- ``["function", module, name, line, checksum, defaults, closure]``: a function by where its code is, and the values
  that it holds; ``["method", object, name]`` and ``["partial", function, arguments, keywords]`` accordingly;
- ``["device", kind]``: a torch device, of which each worker has its own;
- ``["other", class]``: anything else; only its class can be compared.

A receiver makes functions from code that its own script has, never from bytes.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Form = list[Any]

_ATOMS = (type(None), bool, int, float, str, bytes, torch.dtype)


def class_name(kind: type) -> str:
    """Where a class is from, and its name there."""
    return f"{kind.__module__}.{kind.__qualname__}"


_OF_A_MACHINE = re.compile(r"(.*_)?(ranks?|devices?)(_ids?)?")


def differs_by_machine(name: str) -> bool:
    """Whether an attribute of this name is a worker's own: of which rank it is, or on which device."""
    return _OF_A_MACHINE.fullmatch(name) is not None


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a stage's parameters are; the host where it has none."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


@dataclass
class Parts:
    """The modules and parameters of a stage, by path, and by id the path of each."""

    modules: Mapping[str, torch.nn.Module]
    tensors: Mapping[str, torch.Tensor]
    _paths: dict[int, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Parts:
        """All of ``module``; what is there under several names counts under the first."""
        modules = dict(module.named_modules())
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        return cls(
            modules,
            tensors,
            {id(part): path for path, part in modules.items()},
            {id(tensor): name for name, tensor in tensors.items()},
        )

    def with_tensors(self, more: Mapping[str, torch.Tensor]) -> Parts:
        """These and ``more``; what is here already keeps its name."""
        names = {id(tensor): name for name, tensor in more.items()}
        return Parts(self.modules, {**self.tensors, **more}, self._paths, {**names, **self._names})

    def path(self, module: Any) -> str | None:
        """Of a module in this stage."""
        return self._paths.get(id(module))

    def name(self, tensor: Any) -> str | None:
        """Of a parameter or buffer in this stage."""
        return self._names.get(id(tensor))


def form_of(value: Any, parts: Parts) -> Form:
    """The form of ``value``, of a stage with ``parts``."""
    if isinstance(value, _ATOMS):
        return ["plain", value]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        kind = "list" if type(value) is list else "tuple"
        return _together(kind, [form_of(item, parts) for item in value], lambda items: type(value)(items))
    if type(value) is dict and all(isinstance(key, _ATOMS) for key in value):
        items = [form_of(item, parts) for item in value.values()]
        if all(item[0] == "plain" for item in items):
            return ["plain", {key: item[1] for key, item in zip(value, items, strict=True)}]
        return ["dict", list(value), items]
    if isinstance(value, torch.nn.Module) and parts.path(value) is not None:
        return ["module", parts.path(value)]
    if isinstance(value, torch.Tensor):
        name = parts.name(value)
        return ["parameter", name] if name is not None else ["other", f"{class_name(type(value))} {tuple(value.shape)}"]
    if isinstance(value, types.FunctionType):
        return _function_form(value, parts)
    if isinstance(value, types.MethodType):
        return ["method", form_of(value.__self__, parts), value.__name__]
    if type(value) is functools.partial:
        arguments = [form_of(list(value.args), parts), form_of(dict(value.keywords), parts)]
        return ["partial", form_of(value.func, parts), *arguments]
    if isinstance(value, torch.device):
        return ["device", value.type]
    return ["other", class_name(type(value))]


def _together(kind: str, items: list[Form], plain: Callable[[list[Any]], Any]) -> Form:
    if all(item[0] == "plain" for item in items):
        return ["plain", plain([item[1] for item in items])]
    return [kind, items]


def _function_form(function: types.FunctionType, parts: Parts) -> Form:
    code = function.__code__
    held = [cell_contents(cell) for cell in function.__closure__ or ()]
    defaults = [list(function.__defaults__ or ()), dict(function.__kwdefaults__ or {})]
    where = [function.__module__, function.__qualname__, code.co_firstlineno, checksum_of(code)]
    return ["function", *where, form_of(defaults, parts), form_of(held, parts)]


def cell_contents(cell: types.CellType) -> Any:
    """What a closure holds; None for what it doesn't hold yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_known(form: Form) -> bool:
    """Whether all of the value is in the form, so that it can be made from it."""
    kind = form[0]
    if kind in ("list", "tuple"):
        return all(is_known(item) for item in form[1])
    if kind == "dict":
        return all(is_known(item) for item in form[2])
    if kind == "function":
        return is_known(form[5]) and is_known(form[6])
    if kind == "method":
        return is_known(form[1])
    if kind == "partial":
        return all(is_known(item) for item in form[1:])
    return bool(kind != "other")


@functools.lru_cache(maxsize=4096)
def checksum_of(code: types.CodeType) -> int:
    """Tells two functions on one line apart."""
    inner = [checksum_of(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return zlib.crc32(repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, inner)).encode())


class CodeOfTheScript:
    """Finds the code of functions: among those that this worker's stages hold, and in all that this process has loaded.

    Args:
        functions: those that the stages hold.
    """

    def __init__(self, functions: Iterable[types.FunctionType] = ()) -> None:
        self._held = [(function.__module__, function.__code__, function.__globals__) for function in functions]

    def find(self, module: str, name: str, line: int, checksum: int) -> tuple[types.CodeType, dict[str, Any]] | None:
        """The code and the globals of function ``name`` that begins on ``line`` of ``module``; None if not found."""
        held = [(code, names) for where, code, names in self._held if where == module]
        for code, names in itertools.chain(held, _all_code(module)):
            same_name = code.co_name == name.split(".")[-1]
            if same_name and code.co_firstlineno == line and checksum_of(code) == checksum:
                return code, names
        return None


def _all_code(module: str) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """All code objects of a module that this process has: of its functions and classes, and of what runs now."""
    loaded = sys.modules.get(module)
    waiting: list[tuple[types.CodeType, dict[str, Any]]] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            waiting.append((frame.f_code, frame.f_globals))
        frame = frame.f_back
    for value in list(vars(loaded).values()) if loaded is not None else ():
        for item in (value, *(vars(value).values() if isinstance(value, type) else ())):
            if isinstance(item, types.FunctionType) and item.__module__ == module:
                waiting.append((item.__code__, item.__globals__))
    seen: set[int] = set()
    while waiting:
        code, names = waiting.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        yield code, names
        waiting += [(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType)]


def value_of(form: Form, parts: Parts, code: CodeOfTheScript) -> Any:
    """The value with this form in the stage with ``parts``. Raises LookupError when it can't be made here."""
    kind = form[0]
    if kind == "plain":
        return _own_copy(form[1])
    if kind in ("list", "tuple"):
        items = [value_of(item, parts, code) for item in form[1]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: value_of(item, parts, code) for key, item in zip(form[1], form[2], strict=True)}
    if kind == "module" and form[1] in parts.modules:
        return parts.modules[form[1]]
    if kind == "parameter" and form[1] in parts.tensors:
        return parts.tensors[form[1]]
    if kind == "function":
        return _function(form, parts, code)
    if kind == "device":
        return torch.device(form[1])
    if kind == "method":
        holder = value_of(form[1], parts, code)
        if hasattr(holder, form[2]):
            return getattr(holder, form[2])
    if kind == "partial":
        function, arguments, named = (value_of(item, parts, code) for item in form[1:])
        return functools.partial(function, *arguments, **named)
    raise LookupError(shown(form))


def _function(form: Form, parts: Parts, code: CodeOfTheScript) -> Any:
    _, module, name, line, checksum, defaults, held = form
    loaded = sys.modules.get(module)
    at_the_top = None if loaded is None else getattr(loaded, name, None)
    if isinstance(at_the_top, types.FunctionType) and checksum_of(at_the_top.__code__) == checksum:
        return at_the_top
    found = code.find(module, name, line, checksum)
    if found is None:
        raise LookupError(shown(form))
    positional, named = value_of(defaults, parts, code)
    cells = tuple(types.CellType(value) for value in value_of(held, parts, code))
    made = types.FunctionType(found[0], found[1], name.split(".")[-1], tuple(positional) or None, cells or None)
    made.__kwdefaults__ = named or None
    made.__qualname__, made.__module__ = name, module
    return made


def _own_copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_own_copy(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_own_copy(item) for item in value)
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    return value


def shown(form: Form | None) -> str:
    """A form for a message, short."""
    if form is None:
        return "nothing"
    if form[0] == "plain":
        return f"{form[1]!r:.60}"
    if form[0] == "function":
        return f"{form[2]} (line {form[3]} of {form[1]})"
    if form[0] == "method":
        return f"the method {form[2]} of {shown(form[1])}"
    return f"{form[0]} {form[1]!s:.60}"
