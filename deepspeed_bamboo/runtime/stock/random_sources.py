"""Random numbers that layers draw from elsewhere than the global generators.

Megatron and DeepSpeed keep named states in a tracker, one for each process, and layers swap them in for a while
(dropout of tensor-parallel layers does). Other layers have a generator of their own as an attribute. Neither is where
it was on the worker that was lost, so both have to start every forward from its seed.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import singledispatch
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

# By this name DeepSpeed, gpt-neox and every Megatron keep theirs in the module that makes it.
_TRACKER = "_CUDA_RNG_STATE_TRACKER"
_NO_SOURCES = frozenset({type(None), bool, int, float, str, dict, list, tuple, set, OrderedDict})
_MOST_LOOKED_AT, _FIRST = 10_000, 100  # objects in a data set; entries of one container


@dataclass(frozen=True)
class RandomSource:
    """One of them. ``set_state`` takes what ``state`` returns, ``seed`` a 63-bit number and the worker's device."""

    state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int, torch.device], None]


def trackers() -> list[RandomSource]:
    """Those of this process, in the order of their modules' names."""
    found: dict[int, Any] = {}
    for name in _naming_modules().up_to_date():
        tracker = _variables(sys.modules.get(name)).get(_TRACKER)
        if callable(getattr(tracker, "get_states", None)) and callable(getattr(tracker, "set_states", None)):
            found.setdefault(id(tracker), tracker)
    return [_tracker(tracker) for tracker in found.values()]


class _NamingModules:
    """The modules with a variable for a tracker, whatever its value is, among thousands that have none.

    Each is looked at once, unless modules have gone. The script itself is always among them: it may still run.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._count = 0
        self._newest = ""

    def up_to_date(self) -> list[str]:
        """In alphabetical order."""
        added = max(0, len(sys.modules) - self._count)
        new = list(itertools.islice(reversed(sys.modules), added + 1))  # new ones are at the end
        if new.pop() != self._newest:
            self._names, self._count, new = set(), 0, list(reversed(sys.modules))
        if new:
            self._names.update(name for name in new if _TRACKER in _variables(sys.modules.get(name)))
            self._count, self._newest = self._count + len(new), new[0]
        return sorted({*self._names, "__main__"})


@functools.cache
def _naming_modules() -> _NamingModules:
    """Of this process."""
    return _NamingModules()


def _variables(module: Any) -> dict[str, Any]:
    # Not by getattr of a variable, which has lazy modules import.
    return getattr(module, "__dict__", {})


def sources_of(module: torch.nn.Module) -> list[RandomSource]:
    """Generators that ``module``'s layers, functions and submodules have as attributes, each once.

    In an order that does not depend on which attribute was set first.
    """
    found: dict[int, RandomSource] = {}
    for owner in _owners(module):
        held = [(name, value) for name, value in vars(owner).items() if value.__class__ not in _NO_SOURCES]
        for _, value in sorted(held, key=lambda pair: pair[0]):
            source = source_for(value)
            if source is not None:
                found.setdefault(id(value), source)
    return list(found.values())


def sources_within(value: Any) -> list[RandomSource]:
    """Generators that ``value`` (a data set) has in attributes, lists, tuples and dictionaries, however deep."""
    found: dict[int, RandomSource] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < _MOST_LOOKED_AT:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        source = source_for(one)
        if source is not None:
            found[id(one)] = source
        else:
            waiting += _parts_of(one)
    return list(found.values())


def _parts_of(value: Any) -> list[Any]:
    """What to look at next; of a long list (of file names, of samples) the beginning."""
    if isinstance(value, (list, tuple)):
        inside = list(value[:_FIRST])
    elif isinstance(value, dict):
        inside = list(itertools.islice(value.values(), _FIRST))
    elif isinstance(value, (type, ModuleType, torch.Tensor)):
        inside = []
    elif isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        kept = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        inside = [*kept, *(value.__defaults__ or ()), *(its for its in named if source_for(its) is not None)]
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return [part for part in inside if part is not None and not isinstance(part, (bool, int, float, str, bytes))]


def _owners(module: torch.nn.Module) -> Iterator[Any]:
    yield from module.modules()
    for function in getattr(module, "forward_funcs", ()):
        if not isinstance(function, torch.nn.Module) and hasattr(function, "__dict__"):
            yield function


def _tracker(tracker: Any) -> RandomSource:
    def reseed(seed: int, device: torch.device) -> None:
        states = tracker.get_states()
        for number, (name, state) in enumerate(sorted(states.items())):
            own = (seed + number) % 2**63
            if isinstance(state, torch.Generator):
                state.manual_seed(own)
            else:
                states[name] = torch.Generator(device).manual_seed(own).get_state()
        tracker.set_states(states)

    def state() -> dict[str, tuple[Any, torch.Tensor]]:
        return {
            name: (its, its.get_state() if isinstance(its, torch.Generator) else its.clone())
            for name, its in tracker.get_states().items()
        }

    def set_state(states: dict[str, tuple[Any, torch.Tensor]]) -> None:
        for its, value in states.values():
            if isinstance(its, torch.Generator):
                its.set_state(value)
        tracker.set_states({n: its if isinstance(its, torch.Generator) else v for n, (its, v) in states.items()})

    return RandomSource(state, set_state, reseed)


def _seeds(method: Callable[[int], Any]) -> Callable[[int, torch.device], None]:
    def reseed(seed: int, _: torch.device) -> None:
        method(seed)

    return reseed


@singledispatch
def source_for(value: Any) -> RandomSource | None:
    """How to seed ``value``, if it is a generator whose numbers follow from a seed; else None."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator

        def reseed(seed: int, _: torch.device) -> None:
            bits.state = type(bits)(seed).state

        return RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state), reseed)
    if isinstance(value, numpy.random.RandomState):
        return RandomSource(value.get_state, value.set_state, lambda seed, _: value.seed(seed % 2**32))
    return None


@source_for.register
def _(value: torch.Generator) -> RandomSource:
    return RandomSource(value.get_state, value.set_state, _seeds(value.manual_seed))


@source_for.register
def _(value: random.Random) -> RandomSource | None:
    if isinstance(value, random.SystemRandom):
        return None
    return RandomSource(value.getstate, value.setstate, _seeds(value.seed))
