"""Makes what functions and objects of the script hold in another replica, from its plain form (``held_values.py``).

What is there already is changed in place, so whoever refers to it sees it. Code and classes are found in this process,
never received.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_bamboo.runtime.stock import generator_forms, held_kinds
from deepspeed_bamboo.runtime.stock.held_values import CONTAINERS, MAPPINGS, NAMED_IN, is_plain_class
from deepspeed_bamboo.runtime.stock.plain_forms import (
    CodeOfTheScript,
    Form,
    Parts,
    checksum_of,
    class_name,
    differs_by_machine,
)


class Examples:
    """What this worker's own stages hold: functions, classes, and objects that every worker has one of."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        self.code = CodeOfTheScript(functions)
        self._objects = {class_name(type(value)): value for value in objects}

    def one(self, kind: str) -> Any:
        """The object of a class that every worker has one of. Raises LookupError where this one has none."""
        if kind not in self._objects:
            raise LookupError(f"no {kind} is known here")
        return self._objects[kind]

    def kind(self, name: str) -> Any:
        """The class with this name. Raises LookupError where it isn't found."""
        if name in self._objects:
            return type(self._objects[name])
        where, _, last = name.rpartition(".")
        while where:
            found = sys.modules.get(where)
            if found is not None:
                return functools.reduce(lambda holder, part: _part(holder, part, name), last.split("."), found)
            where, _, before = where.rpartition(".")
            last = f"{before}.{last}"
        raise LookupError(f"class {name}")


def _part(holder: Any, part: str, name: str) -> Any:
    if not hasattr(holder, part):
        raise LookupError(f"class {name}")
    return getattr(holder, part)


class Fitting:
    """One graph, made or brought up to date in a replica with ``parts``.

    Args:
        nodes: of the graph.
        tensors: their values by place; None where a tensor keeps the values that it has.
        parts: of the replica.
        examples: what this worker has of the kind.
        device: for tensors that are not on the host.
    """

    def __init__(
        self,
        nodes: Sequence[Form],
        tensors: Sequence[torch.Tensor] | None,
        *,
        parts: Parts,
        examples: Examples,
        device: torch.device,
    ) -> None:
        self.examples = examples
        self.new_tensors = False
        self._nodes, self._tensors, self._parts, self._device = nodes, tensors, parts, device
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()
        self._running: set[int] = set()
        self._later: list[Callable[[], None]] = []

    def root(self, item: Form, existing: Any = None) -> Any:
        """The value of ``item``, which is ``existing`` where that can become it. Raises LookupError."""
        value = self.value(item, existing)
        while self._later:
            self._later.pop(0)()
        return value

    def value(self, item: Form, existing: Any = None) -> Any:
        """As :meth:`root`, but what closures hold may come later."""
        if item[0] == "plain":
            return item[1]
        place = item[1]
        if place not in self._made:
            node = self._nodes[place]
            if place in self._running:
                raise LookupError(f"a {node[0]} that holds itself")
            self._running.add(place)
            kind = "container" if node[0] in CONTAINERS else node[0]
            made = _MAKE[kind](self, place, node, existing)
            self._made.setdefault(place, made)
        return self._made[place]

    def _reused(self, existing: Any, fits: bool) -> Any:
        """``existing``, if it ``fits`` and stands for nothing else yet; else None."""
        if existing is None or not fits or id(existing) in self._used:
            return None
        self._used.add(id(existing))
        return existing

    # -- containers ------------------------------------------------------------------------------------

    def container(self, place: int, node: Form, existing: Any) -> Any:
        """A list, dictionary and so on."""
        name, items, extra = node
        kind: Any = CONTAINERS[name]
        old: Any = existing if type(existing) is kind else None
        if name in ("tuple", "frozenset"):
            before = list(old or ())
            return kind(self.value(item, _at(before, index)) for index, item in enumerate(items))
        target = self._reused(old, name != "deque" or (old is not None and old.maxlen == extra[1]))
        if target is None:
            target = kind(maxlen=extra[1]) if name == "deque" else kind()
        self._made[place] = target
        if name in MAPPINGS:
            self._fill_mapping(target, items, extra, default=name == "default")
            return target
        before = list(target)
        values = [self.value(item, _at(before, index)) for index, item in enumerate(items)]
        target.clear()
        (target.update if name == "set" else target.extend)(values)
        return target

    def _fill_mapping(self, target: Any, items: list[Form], extra: Form, *, default: bool) -> None:
        before = dict(target)
        pairs = [(self.value(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]
        values = {key: self.value(value, before.get(key)) for key, value in pairs}
        target.clear()
        target.update(values)
        if default:
            target.default_factory = self.value(extra)

    # -- tensors ---------------------------------------------------------------------------------------

    def tensor(self, place: int, node: Form, existing: Any) -> Any:
        """A tensor that no stage has by name."""
        _, which, kind, shape, dtype, device, requires_grad = node
        fits = isinstance(existing, torch.Tensor) and class_name(type(existing)) == kind and existing.is_leaf
        alike = fits and (list(existing.shape), existing.dtype) == (shape, dtype)
        target = self._reused(existing, alike and not (self.new_tensors and self._tensors is not None))
        if target is None:
            target = torch.zeros(shape, dtype=dtype, device="cpu" if device == "cpu" else self._device)
            if kind == class_name(torch.nn.Parameter):
                target = torch.nn.Parameter(target, requires_grad=False)
            elif kind != class_name(torch.Tensor):
                raise LookupError(f"a tensor of class {kind}")
        if self._tensors is not None:
            with torch.no_grad():
                target.detach().copy_(self._tensors[which])
        if target.requires_grad != requires_grad:
            target.requires_grad_(requires_grad)
        return target

    def array(self, place: int, node: Form, existing: Any) -> Any:
        """An array of numpy's."""
        value = np.frombuffer(node[3], dtype=np.dtype(node[1])).reshape(node[2])
        fits = isinstance(existing, np.ndarray) and (existing.dtype, existing.shape) == (value.dtype, value.shape)
        target = self._reused(existing, fits)
        if target is None:
            return value.copy()
        target[...] = value
        return target

    def generator(self, place: int, node: Form, existing: Any) -> Any:
        """A generator of random numbers, in its state."""
        device = "cpu" if node[1] == "cpu" else self._device
        target = self._reused(existing, isinstance(existing, torch.Generator) and existing.device.type == node[1])
        target = torch.Generator(device) if target is None else target
        target.set_state(torch.frombuffer(bytearray(node[2]), dtype=torch.uint8))
        return target

    def plain_generator(self, place: int, node: Form, existing: Any) -> Any:
        """A generator of Python's, or one of numpy's that is its state."""
        _, name, state = node
        fits = type(existing) is generator_forms.PLAIN[name] and generator_forms.takes(existing, state)
        target = self._reused(existing, fits)
        target = generator_forms.new_plain(name, state) if target is None else target
        generator_forms.set_state(target, state)
        return target

    def bits(self, place: int, node: Form, existing: Any) -> Any:
        """What generators of numpy draw from."""
        _, name, state, family = node
        fits = type(existing) is generator_forms.BITS.get(name) and generator_forms.family_bytes(existing) == family
        target = self._reused(existing, fits)
        target = generator_forms.new_bits(name, family) if target is None else target
        generator_forms.set_state(target, state)
        return target

    def drawing(self, place: int, node: Form, existing: Any) -> Any:
        """A generator of numpy, whose bits others may draw from, too."""
        old = existing if type(existing) is np.random.Generator else None
        bits = self.value(node[1], None if old is None else old.bit_generator)
        if old is not None and old.bit_generator is bits and self._reused(old, True) is not None:
            return old
        return np.random.Generator(bits)

    # -- code ------------------------------------------------------------------------------------------

    def function(self, place: int, node: Form, existing: Any) -> Any:
        """A function with the closure and the defaults that it has."""
        _, module, name, line, checksum, defaults, held = node[:7]
        its = existing if isinstance(existing, types.FunctionType) else None
        same = its is not None and _where(its) == (module, name, line, checksum)
        old = self._reused(its, same)
        if defaults == ["plain", None]:  # a library's, of which no cells are sent
            return self._at_the_top(node) if old is None else old
        own = (old.__closure__ or ()) if old is not None else ()
        cells = tuple(self.value(cell, _at(own, index)) for index, cell in enumerate(held))
        made = old
        if old is None or any(mine is not other for mine, other in zip(cells, own, strict=True)):
            made = self._new_function(node, cells)
        self._made[place] = made
        if defaults != ["plain", None]:
            before = (made.__defaults__, made.__kwdefaults__)
            self._later.append(lambda: self._set_defaults(made, defaults, before))
        return made

    def _set_defaults(self, function: types.FunctionType, item: Form, before: Any) -> None:
        function.__defaults__, function.__kwdefaults__ = self.value(item, before)

    def _at_the_top(self, node: Form) -> Any:
        found = getattr(sys.modules.get(node[1]), node[2], None)
        if not isinstance(found, types.FunctionType) or checksum_of(found.__code__) != node[4]:
            raise LookupError(f"{node[2]} of {node[1]}")
        return found

    def _new_function(self, node: Form, cells: tuple[types.CellType, ...]) -> types.FunctionType:
        _, module, name, line, checksum = node[:5]
        found = self.examples.code.find(module, name, line, checksum)
        if found is None:
            raise LookupError(f"{name} (line {line} of {module})")
        made = types.FunctionType(found[0], found[1], name.split(".")[-1], None, cells or None)
        made.__qualname__, made.__module__ = name, module
        return made

    def cell(self, place: int, node: Form, existing: Any) -> Any:
        """What a closure has a name for. Its contents come later: they may hold the closure itself."""
        target = self._reused(existing, isinstance(existing, types.CellType)) or types.CellType()
        if node[1] != ["empty"]:
            before = target.cell_contents if _is_filled(target) else None
            self._later.append(lambda: setattr(target, "cell_contents", self.value(node[1], before)))
        return target

    def method(self, place: int, node: Form, existing: Any) -> Any:
        """A bound method."""
        holder = self.value(node[1], getattr(existing, "__self__", None))
        of_its_class = getattr(type(holder), node[2], None)
        if isinstance(of_its_class, types.FunctionType):
            # Where the script has put a wrapper on the object under that name, what it wraps is the class's.
            return types.MethodType(of_its_class, holder)
        if not hasattr(holder, node[2]):
            raise LookupError(f"the method {node[2]} of {class_name(type(holder))}")
        return getattr(holder, node[2])

    def bound(self, place: int, node: Form, existing: Any) -> Any:
        """A function that the script has bound to an object."""
        old = existing if isinstance(existing, types.MethodType) else None
        function = self.value(node[1], getattr(old, "__func__", None))
        return types.MethodType(function, self.value(node[2], getattr(old, "__self__", None)))

    def partial(self, place: int, node: Form, existing: Any) -> Any:
        """A partial."""
        old = existing if type(existing) is functools.partial else None
        function = self.value(node[1], None if old is None else old.func)
        arguments = self.value(node[2], None if old is None else list(old.args))
        named = self.value(node[3], None if old is None else dict(old.keywords))
        return functools.partial(function, *arguments, **named)

    def object(self, place: int, node: Form, existing: Any) -> Any:
        """An object of a class of the script's."""
        _, name, items = node
        target = self._reused(existing, class_name(type(existing)) == name)
        if target is None:
            kind = self._class(name, is_plain_class)
            target = kind.__new__(kind)
        self._made[place] = target
        self._fill_attributes(target, items)
        return target

    def _fill_attributes(self, target: Any, items: list[Form]) -> None:
        """Give ``target`` these attributes; those that are of its own machine stay."""
        own = {attribute: value for attribute, value in vars(target).items() if differs_by_machine(attribute)}
        self._fill_mapping(vars(target), items, ["plain", None], default=False)
        vars(target).update(own)

    def _class(self, name: str, fits: Callable[[Any], bool]) -> Any:
        kind = self.examples.kind(name)
        if not isinstance(kind, type) or not fits(kind):
            raise LookupError(f"class {name}")
        return kind

    def holding(self, place: int, node: Form, existing: Any) -> Any:
        """An object of a class made from dict, list or set."""
        _, name, container, items, attributes = node
        base: Any = CONTAINERS[container]
        target = self._reused(existing, class_name(type(existing)) == name)
        if target is None:
            target = base.__new__(self._class(name, lambda kind: held_kinds.base_of(kind) is base))
        self._made[place] = target
        if attributes == held_kinds.ITSELF:
            target.__dict__ = target
        values: Any
        if base is dict:
            before = dict(dict.items(target))
            pairs = [(self.value(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]
            values = {key: self.value(value, before.get(key)) for key, value in pairs}
        else:
            old = list(base.__iter__(target))
            values = [self.value(item, _at(old, index)) for index, item in enumerate(items)]
        base.clear(target)
        (base.extend if base is list else base.update)(target, values)
        if attributes != held_kinds.ITSELF:
            self._fill_attributes(target, attributes)
        return target

    def whole(self, place: int, node: Form, existing: Any) -> Any:
        """What holds no others: a member of an enumeration, an exact number, a buffer."""
        if node[0] == "member":
            return held_kinds.member(self.examples.kind(node[1]), node[2][1])
        if node[0] == "number":
            return held_kinds.NUMBERS[node[1]](node[2])
        fits = isinstance(existing, bytearray) or hasattr(existing, "typecode")
        return held_kinds.buffer(self._reused(existing, fits), node[1], node[2])

    def part(self, place: int, node: Form, existing: Any) -> Any:
        """A module, parameter or buffer of the stage."""
        found = self._parts.modules.get(node[1]) if node[0] == "module" else self._parts.tensors.get(node[1])
        if found is None:
            raise LookupError(f"{node[0]} {node[1]}")
        return found

    def found_here(self, place: int, node: Form, existing: Any) -> Any:
        """What a process has by name."""
        if node[0] == "named" and node[1] in NAMED_IN and hasattr(NAMED_IN[node[1]], node[2]):
            return getattr(NAMED_IN[node[1]], node[2])
        if node[0] == "import" and node[1] in sys.modules:
            return sys.modules[node[1]]
        if node[0] == "class":
            return self.examples.kind(node[1])
        if node[0] == "logger":
            return logging.getLogger(node[1])
        if node[0] == "device":
            return torch.device(node[1])
        if node[0] == "own":
            return existing if class_name(type(existing)) == node[1] else self.examples.one(node[1])
        if node[0] == "noted":
            return existing
        raise LookupError(" ".join(map(str, node)))


_MAKE: Mapping[str, Callable[[Fitting, int, Form, Any], Any]] = {
    "container": Fitting.container,
    "tensor": Fitting.tensor,
    "array": Fitting.array,
    "generator": Fitting.generator,
    "random": Fitting.plain_generator,
    "bits": Fitting.bits,
    "drawing": Fitting.drawing,
    "function": Fitting.function,
    "cell": Fitting.cell,
    "method": Fitting.method,
    "bound": Fitting.bound,
    "partial": Fitting.partial,
    "object": Fitting.object,
    "holding": Fitting.holding,
    **dict.fromkeys(("member", "number", "buffer"), Fitting.whole),
    "module": Fitting.part,
    "parameter": Fitting.part,
    "complex": lambda fitting, place, node, existing: complex(node[1], node[2]),
    **dict.fromkeys(("named", "import", "class", "logger", "device", "own", "noted", "other"), Fitting.found_here),
}


def _where(function: types.FunctionType) -> tuple[str, str, int, int]:
    code = function.__code__
    return function.__module__, function.__qualname__, code.co_firstlineno, checksum_of(code)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _at(values: Any, index: int) -> Any:
    return values[index] if index < len(values) else None
