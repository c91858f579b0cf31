"""What functions and objects of the script hold, as plain data: closures, attributes, lists, tensors; who shares what.

A hook may keep a count, or an average, in its closure or in an object. Whoever takes its stage over needs that as it is
now, and two hooks that share a list must share one there, too. So the values make a graph: ``nodes``, of which each
names others by their place, and ``tensors`` beside it. An item is ``["plain", value]`` or ``["ref", place]``. Nodes:

- ``["list" | "tuple" | "set" | ..., items, extra]``: a container; a dictionary's items are keys and values in turn;
- ``["tensor", place, class, shape, dtype, device, requires_grad]``; ``["noted"]``: a tensor with a graph, made by a
  forward and made again by the next one;
- ``["module", path]``, ``["parameter", name]``: parts of the stage; ``["own", class]``: what every worker has one of;
- ``["function", module, name, line, checksum, defaults, cells]``, ``["cell", item]``, ``["method", item, name]``,
  ``["bound", function, item]``,
  ``["partial", items...]``, ``["object", class, items]``, ``["class", name]``, ``["named", module, name]`` and others;
- ``["holding", class, container, items, attributes]``, ``["member", class, name]``, ``["number", class, text]``,
  ``["buffer", typecode, bytes]``: see ``held_kinds.py``;
- ``["random", class, state]``, ``["bits", class, state, family]``, ``["drawing", bits]``: generators of random numbers
  (``generator_forms.py``);
- ``["other", class]``: what can't be sent.

``held_fitting.py`` is the inverse.
"""

from __future__ import annotations

import copy
import enum
import functools
import logging
import math
import operator
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from deepspeed_bamboo.runtime.stock import generator_forms, held_kinds
from deepspeed_bamboo.runtime.stock.plain_forms import Form, checksum_of, class_name, differs_by_machine

ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.dtype})
MAPPINGS: Mapping[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter, "default": defaultdict}
CONTAINERS: Mapping[str, type] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, **MAPPINGS,
}  # fmt: skip
_NAMES = {kind: name for name, kind in CONTAINERS.items()}
NAMED_IN = {
    "torch": torch, "torch.nn.functional": torch.nn.functional, "math": math, "operator": operator,
    "random": random, "numpy.random.mtrand": np.random.mtrand,
}  # fmt: skip
"""Where functions without code of their own, and the generators that a process has one of, are looked for, by name."""
_OF_THE_PROCESS = (("torch", "default_generator"), ("random", "_inst"), ("numpy.random.mtrand", "_rand"))
MUTABLE = frozenset(
    {"list", "set", "deque", *MAPPINGS, "tensor", "array", "generator", "random", "bits", "cell", "object"}
    | {"holding", "buffer"}
)
"""Kinds of nodes that can be changed where they are."""
_LIBRARIES = frozenset({"torch", "deepspeed", "numpy"})
_MOST_NODES = 20_000
_MOST_ITEMS = 1_000


@dataclass
class Graph:
    """See the module. ``roots`` are items, in the order in which they were read."""

    nodes: list[Form] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    roots: list[Form] = field(default_factory=list)

    def reachable(self, item: Form) -> Iterator[Form]:
        """The nodes of ``item`` and of all that it holds."""
        return (self.nodes[place] for place in self.places(item))

    def places(self, item: Form) -> list[int]:
        """Where the nodes of ``item`` and of all that it holds are, in an order that depends on ``item`` alone."""
        waiting, seen = [item], dict[int, None]()
        while waiting:
            item = waiting.pop()
            if item[0] == "ref" and item[1] not in seen:
                seen[item[1]] = None
                waiting += _items(self.nodes[item[1]])
        return list(seen)

    def content(self, item: Form, versions: Sequence[Any]) -> list[Any]:
        """``item`` with all that it holds, wherever in the graph that is; equal for what has not changed.

        ``versions`` of the tensors say whether one has other values.
        """
        places = self.places(item)
        number = {place: index for index, place in enumerate(places)}

        def local(value: Any) -> Any:
            if isinstance(value, list):
                return ["ref", number[value[1]]] if len(value) == 2 and value[0] == "ref" else [local(v) for v in value]
            return value

        nodes = (self.nodes[place] for place in places)
        its = [[versions[node[1]], *node[2:]] if node[0] == "tensor" else local(node) for node in nodes]
        return [item if item[0] == "plain" else None, its]

    def versions(self) -> list[tuple[int, int]]:
        """Of the tensors: what shows that one has other values, or is another one."""
        return [(id(tensor), tensor._version) for tensor in self.tensors]

    def unknown(self, item: Form) -> list[str]:
        """The classes of what can't be sent in ``item``."""
        return sorted({node[1] for node in self.reachable(item) if node[0] == "other"})


def _items(node: Form) -> Iterator[Form]:
    for value in node[1:]:
        if not isinstance(value, list) or not value:
            continue
        if value[0] in ("plain", "ref") and len(value) == 2:
            yield value
        else:
            yield from (item for item in value if isinstance(item, list) and len(item) == 2 and item[0] == "ref")


# The frame of a model of transformers keeps what one run of it has found: every worker has its own.
_OWN = ("deepspeed_bamboo.runtime", "deepspeed_bamboo.models.huggingface")


class Names(Protocol):
    """Finds modules and tensors of a stage; :class:`Parts` is one."""

    def path(self, module: Any) -> str | None:
        """Of a module, None for one of another stage."""

    def name(self, tensor: Any) -> str | None:
        """Of a parameter or buffer likewise."""


class Reader:
    """Reads values of one stage into ``graph``. What is read twice is one node.

    Args:
        parts: of the stage.
        globals_too: read also what functions find in global variables, if it is data.
        contents: False where only the objects themselves matter: nothing is copied, long containers are not read.
    """

    def __init__(self, parts: Names, *, globals_too: bool = False, contents: bool = True) -> None:
        self.graph = Graph()
        self.objects: list[Any] = []  # of the nodes; so no other object gets the id of one that is gone
        self._parts = parts
        self._globals_too = globals_too
        self._contents = contents
        self._places: dict[int, int] = {}

    def root(self, value: Any) -> Form:
        """Read ``value`` as one more root; returns its item."""
        self.graph.roots.append(self.item(value))
        return self.graph.roots[-1]

    def item(self, value: Any) -> Form:
        """``value``, and all that it holds."""
        if value.__class__ in ATOMS or isinstance(value, np.generic):
            return ["plain", value]
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.objects)
            self.objects.append(value)
            self.graph.nodes.append(["other", class_name(type(value))])
            if place < _MOST_NODES:
                self.graph.nodes[place] = self._node(value)
        return ["ref", place]

    def _node(self, value: Any) -> Form:
        kind = value.__class__
        if kind in _NAMES:
            return self._container(value, _NAMES[kind])
        read = _READ.get(kind)
        if read is not None:
            return read(self, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.nn.Module) and self._parts.path(value) is not None:
            return ["module", self._parts.path(value)]
        if isinstance(value, type):
            return ["class", class_name(value)]
        return self._object(value)

    def _container(self, value: Any, name: str) -> Form:
        extra: Any = ["plain", value.maxlen] if name == "deque" else ["plain", None]
        if name == "default":
            extra = self.item(value.default_factory)
        if not self._contents and len(value) > _MOST_ITEMS:
            return [name, [], extra]
        inner = (part for pair in value.items() for part in pair) if name in MAPPINGS else value
        return [name, [self.item(item) for item in inner], extra]

    def _tensor(self, value: torch.Tensor) -> Form:
        name = self._parts.name(value)
        if name is not None:
            return ["parameter", name]
        if not value.is_leaf:
            return ["noted"]
        if value.layout is not torch.strided:
            return ["other", class_name(type(value))]
        self.graph.tensors.append(value)
        what = [class_name(type(value)), list(value.shape), value.dtype, value.device.type, value.requires_grad]
        return ["tensor", len(self.graph.tensors) - 1, *what]

    def function(self, value: types.FunctionType) -> Form:
        """A function, with what it keeps from call to call."""
        code = value.__code__
        where = [value.__module__, value.__qualname__, code.co_firstlineno, checksum_of(code)]
        if is_of_a_library(value.__module__):
            return ["function", *where, ["plain", None], []]
        defaults = self.item((value.__defaults__, value.__kwdefaults__))
        cells = [self.item(cell) for cell in value.__closure__ or ()]
        node = ["function", *where, defaults, cells]
        return [*node, self._globals_of(value)] if self._globals_too else node

    def _globals_of(self, value: types.FunctionType) -> list[Form]:
        names = value.__globals__
        held = ((name, names[name]) for name in global_names(value.__code__) if name in names)
        return [part for name, its in held if is_data(its) for part in (self.item(name), self.item(its))]

    def cell(self, value: types.CellType) -> Form:
        """What a closure holds."""
        try:
            return ["cell", self.item(value.cell_contents)]
        except ValueError:
            return ["cell", ["empty"]]

    def partial(self, value: functools.partial[Any]) -> Form:
        """A partial."""
        return ["partial", self.item(value.func), self.item(list(value.args)), self.item(dict(value.keywords))]

    def method(self, value: types.MethodType) -> Form:
        """A bound method; one that an object's class has not is a function bound by hand."""
        function: Any = value.__func__
        of_its_class = getattr(type(value.__self__), getattr(function, "__name__", ""), None)
        if of_its_class is not function and isinstance(function, types.FunctionType):
            return ["bound", self.item(value.__func__), self.item(value.__self__)]
        return ["method", self.item(value.__self__), value.__name__]

    def array(self, value: np.ndarray[Any, Any]) -> Form:
        """An array of numbers."""
        if value.dtype.kind not in "biufc":
            return ["other", class_name(type(value))]
        return ["array", value.dtype.str, list(value.shape), value.tobytes() if self._contents else b""]

    def generator(self, value: Any) -> Form:
        """A generator of torch's or Python's, or one of numpy's that is its state."""
        name = _name_in_process(value)
        if name is not None:
            return ["named", *name]
        if isinstance(value, torch.Generator):
            return ["generator", value.device.type, bytes(value.get_state().numpy())]
        return ["random", type(value).__name__, generator_forms.state_bytes(value) if self._contents else b""]

    def bits(self, value: Any) -> Form:
        """What generators of numpy draw from."""
        known = [generator_forms.state_bytes(value), generator_forms.family_bytes(value)] if self._contents else []
        return ["bits", type(value).__name__, *known]

    def _object(self, value: Any) -> Form:
        kind = type(value)
        if is_of_a_library(kind.__module__):
            one_a_worker = kind.__module__.startswith("deepspeed") and not isinstance(value, torch.optim.Optimizer)
            return ["own" if one_a_worker else "other", class_name(kind)]
        if isinstance(value, (torch.nn.Module, *generator_forms.KINDS)):
            return ["other", class_name(kind)]
        if isinstance(value, enum.Enum):
            key = held_kinds.read_member(value)
            return ["other" if key is None else "member", class_name(kind), *([] if key is None else [key])]
        base = held_kinds.base_of(kind)
        if base is not None:
            return self._holding(value, base)
        # Where no other worker can make one, it may have one.
        known = held_kinds.has_attributes_only(kind) and held_kinds.is_the_scripts(kind)
        if known or is_plain_class(kind):
            return ["object", class_name(kind), self._attributes(value)]
        return held_kinds.read_whole(value) or ["other", class_name(kind)]

    def _holding(self, value: Any, base: Any) -> Form:
        """Of a class made from dict, list or set."""
        inner = (part for pair in base.items(value) for part in pair) if base is dict else base.__iter__(value)
        small = self._contents or base.__len__(value) <= _MOST_ITEMS
        attributes: Any = held_kinds.ITSELF if vars(value) is value else self._attributes(value)
        items = [self.item(item) for item in inner] if small else []
        return ["holding", class_name(type(value)), _NAMES[base], items, attributes]

    def _attributes(self, value: Any) -> list[Form]:
        attributes = [(name, its) for name, its in vars(value).items() if not differs_by_machine(name)]
        return [self.item(part) for pair in attributes for part in pair]


_READ: Mapping[type, Callable[[Reader, Any], Form]] = {
    types.FunctionType: Reader.function,
    types.CellType: Reader.cell,
    types.MethodType: Reader.method,
    functools.partial: Reader.partial,
    types.ModuleType: lambda reader, value: ["import", value.__name__],
    types.BuiltinFunctionType: lambda reader, value: _named(value),
    type(torch.tanh): lambda reader, value: _named(value),
    torch.device: lambda reader, value: ["device", value.type],
    torch.Generator: Reader.generator,
    np.random.Generator: lambda reader, value: ["drawing", reader.item(value.bit_generator)],
    np.random.RandomState: Reader.generator,
    random.Random: Reader.generator,
    **dict.fromkeys(generator_forms.BITS.values(), Reader.bits),
    logging.Logger: lambda reader, value: ["logger", value.name],
    np.ndarray: lambda reader, value: reader.array(value),
    complex: lambda reader, value: ["complex", value.real, value.imag],
}


def _name_in_process(value: Any) -> tuple[str, str] | None:
    """Of a generator that every process has one of."""
    return next((it for it in _OF_THE_PROCESS if value is getattr(NAMED_IN[it[0]], it[1], None)), None)


def own_generator(value: Any) -> Any:
    """A copy of ``value``, where that is a generator of which a stage may have its own; else ``value``."""
    known = type(value) in (torch.Generator, np.random.Generator, *generator_forms.PLAIN.values())
    if not known or _name_in_process(value) is not None:
        return value
    if not isinstance(value, torch.Generator):
        return copy.deepcopy(value)
    made = torch.Generator(value.device)
    made.set_state(value.get_state())
    return made


def _named(value: Any) -> Form:
    name = value.__name__
    found = [module for module, its in NAMED_IN.items() if getattr(its, name, None) is value]
    return ["named", found[0], name] if found else ["other", f"{type(value).__name__} {name}"]


def is_plain_class(kind: type) -> bool:
    """Whether an object of ``kind`` is what its attributes are: no slots, no rules of its own for making it."""
    return held_kinds.is_made_plainly(kind)


def is_of_a_library(module: str | None) -> bool:
    """Whether a module's variables are none of the script's."""
    return module is None or module.partition(".")[0] in _LIBRARIES or module.startswith(_OWN)


def is_data(value: Any) -> bool:
    """Whether a global variable holds what a script may change in it."""
    kind = type(value)
    if kind in _NAMES or kind in ATOMS or isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return True
    if isinstance(value, (torch.Generator, *generator_forms.KINDS)):
        return True
    script = not is_of_a_library(kind.__module__) and not isinstance(value, (torch.nn.Module, type))
    return script and is_plain_class(kind)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code may find in global variables, and those of attributes."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
