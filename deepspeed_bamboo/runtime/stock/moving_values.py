"""What a function of the script keeps from call to call, named, so that it shows which of it a call has changed.

It looks at closures, defaults, attributes, objects of the script's classes, lists and dictionaries, at the global
variables that the function and the script's functions it uses name, and at the generators that a process has one of.
Nothing is copied but generators' states; of what is large only a part is looked at.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_bamboo.runtime.stock import generator_forms
from deepspeed_bamboo.runtime.stock.held_values import ATOMS, global_names, is_data, is_of_a_library
from deepspeed_bamboo.runtime.stock.plain_forms import differs_by_machine
from deepspeed_bamboo.runtime.stock.randomness import GeneratorStates

_MOST_LOOKED_AT, _MOST_ITEMS, _MOST_NUMBERS = 5_000, 1_000, 65_536
_LISTS = (list, tuple, set, frozenset, deque)

Values = Mapping[str, Any]
"""By name what a function keeps: numbers, texts, states of generators, tensors with their versions."""


@dataclass(frozen=True)
class _Tensor:
    """One at a moment."""

    tensor: torch.Tensor
    version: int

    def same(self, other: _Tensor) -> bool:
        """Whether ``other``, looked at later, has the same values."""
        one, its = self.tensor, other.tensor
        if one is its:
            return self.version == other.version
        alike = (one.shape, one.dtype, one.device) == (its.shape, its.dtype, its.device)
        return alike and one.layout is its.layout is torch.strided and torch.equal(one, its)


@dataclass(frozen=True)
class _Held:
    """A value, as what it is known, and the function or class that has it."""

    path: str
    where: str
    value: Any

    @property
    def name(self) -> str:
        return f"{self.path} of {self.where}"

    def part(self, path: str, value: Any) -> _Held:
        return _Held(f"{self.path}{path}", self.where, value)


def held_by(function: Callable[..., Any], *, device: torch.device) -> Values:
    """All that ``function`` keeps now, or could draw from on ``device``."""
    found = _of_the_process(device)
    seen: dict[int, Any] = {}  # with the objects, so that their ids stay theirs
    waiting = deque([_Held("the function", "engine.set_batch_fn", function)])
    while waiting and max(len(seen), len(found)) < _MOST_LOOKED_AT:
        held = waiting.popleft()
        leaf = _leaf(held.value)
        if leaf is not None:
            found[held.name] = leaf
        elif id(held.value) not in seen:
            seen[id(held.value)] = held.value
            if isinstance(held.value, _LISTS):
                found[f"the length of {held.name}"] = len(held.value)
            waiting.extend(_parts(held))
    return found


def moved_between(before: Values, now: Values) -> list[str]:
    """The names of what has become another value. What has just come, as in a cache, has not."""
    return [name for name, value in before.items() if name in now and not _same(value, now[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Tensor) and isinstance(other, _Tensor):
        return one.same(other)
    return type(one) is type(other) and bool(one == other)


def _of_the_process(device: torch.device) -> dict[str, Any]:
    states = GeneratorStates.now(device, known=())
    found: dict[str, Any] = {
        "torch's global generator": states.host.numpy().tobytes(),
        "Python's global generator": states.python,
    }
    if states.cuda is not None:
        found["the device's global generator"] = states.cuda.numpy().tobytes()
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        found["numpy's global generator"] = (name, keys.tobytes(), *rest)
    return found


def _leaf(value: Any) -> Any:
    """What is compared of ``value`` itself; None where only its parts are, or nothing."""
    kind = type(value)
    if kind in ATOMS:
        return value if kind in (str, bytes) else repr(value)  # so that a nan is equal to itself
    if isinstance(value, (np.generic, itertools.count)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _Tensor(value, 0 if value.is_inference() else value._version)
    if isinstance(value, torch.Generator):
        return value.get_state().cpu().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if type(value) in (*generator_forms.BITS.values(), *generator_forms.PLAIN.values()):
        return generator_forms.state_bytes(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return (value.shape, zlib.crc32(value.flat[:_MOST_NUMBERS].tobytes()))
    return None


def _parts(held: _Held) -> Iterator[_Held]:
    value = held.value
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield _Held("self", value.__func__.__qualname__, value.__self__)
        yield held.part("", value.__func__)
    elif isinstance(value, functools.partial):
        yield held.part("", value.func)
        yield held.part("'s arguments", value.args)
        yield held.part("'s arguments", value.keywords)
    elif isinstance(value, dict):
        items = list(itertools.islice(value.items(), _MOST_ITEMS))  # at once, for other threads may change it
        yield from (held.part(f"[{key!r}]", its) for key, its in items if type(key) in ATOMS)
    elif isinstance(value, _LISTS):
        yield from (held.part(f"[{n}]", its) for n, its in enumerate(list(itertools.islice(value, _MOST_ITEMS))))
    yield from _of_object(held)


def _of_function(function: types.FunctionType) -> Iterator[_Held]:
    if not _is_of_script(function.__module__):
        return
    where, names = function.__qualname__, function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _Held(name, where, cell.cell_contents)
        except ValueError:
            continue
    yield _Held("the defaults", where, function.__defaults__)
    yield _Held("the defaults", where, function.__kwdefaults__)
    used = global_names(function.__code__)
    for name in used:
        its = names.get(name)
        if isinstance(its, types.ModuleType) and _is_of_script(its.__name__):
            yield from _used(((inner, vars(its).get(inner)) for inner in used), where=its.__name__)
    yield from _used(((name, names.get(name)) for name in used), where=f"{where} (a global variable)")
    yield from (_Held(f"{function.__name__}.{name}", where, its) for name, its in vars(function).items())


def _used(pairs: Iterable[tuple[str, Any]], *, where: str) -> Iterator[_Held]:
    for name, its in pairs:
        if is_data(its) or isinstance(its, (types.FunctionType, types.MethodType, functools.partial, itertools.count)):
            yield _Held(name, where, its)


def _of_object(held: _Held) -> Iterator[_Held]:
    """Attributes of an object of the script's, and what its class has: data, and functions with their variables."""
    value, kind = held.value, type(held.value)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        yield from (held.part(f".{name}", its) for name, its in list(vars(value).items()))
    if isinstance(value, (type, types.ModuleType)) or not _is_of_script(kind.__module__):
        return
    for name, its in list(getattr(value, "__dict__", {}).items()):
        if not differs_by_machine(name):
            yield held.part(f".{name}", its)
    for base in kind.__mro__:
        if not _is_of_script(base.__module__):
            continue
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield held.part(f".{name}", getattr(value, name))
        its_own = {name: its for name, its in vars(base).items() if not name.startswith("__") or callable(its)}
        yield from _used(its_own.items(), where=f"class {base.__name__}")


def _is_of_script(module: str | None) -> bool:
    if is_of_a_library(module):
        return False
    return str(module).partition(".")[0] not in sys.stdlib_module_names
