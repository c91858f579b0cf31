"""What layers and the loss function of a stage keep that is no number, text or buffer: lists, tensors, objects.

A layer may count in a dictionary, keep a history in a list, or a fixed projection in a tensor that is no buffer. A loss
function may keep an average in its closure. A shadow needs them as it does numbers in attributes (``plain_values.py``)
and what hooks keep (``hook_values.py``). All of it goes with a stage's state, and what forwards have ever moved goes
with the gradients of each step.

What several stages have together (an object given in LayerSpecs, a global variable) is the script's: every worker has
one of its own, which its own script changes. A forward that changes it changes it on one worker only; so that is
reported, as is what can't be sent.
"""

from __future__ import annotations

import functools
import io
import sys
import types
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec

from deepspeed_bamboo.runtime.stock.description import is_foreign
from deepspeed_bamboo.runtime.stock.generator_forms import KINDS
from deepspeed_bamboo.runtime.stock.held_fitting import Examples, Fitting
from deepspeed_bamboo.runtime.stock.held_kinds import is_the_scripts
from deepspeed_bamboo.runtime.stock.held_values import ATOMS, MUTABLE, Graph, Reader, is_data
from deepspeed_bamboo.runtime.stock.plain_forms import Form, Parts, device_of
from deepspeed_bamboo.runtime.stock.plain_values import PLAIN
from deepspeed_bamboo.runtime.stock.random_sources import source_for
from deepspeed_bamboo.runtime.stock.script_hooks import LOSS, is_of_stage, source_of

Key = tuple[str, str]
"""The path of a layer (``loss_fn`` for the loss function) and an attribute's name; "" for the loss function itself."""
AttributeState = dict[str, Any]
"""``nodes`` and ``tensors`` of a graph (``held_values.py``); ``where`` has for each root its path, name and item."""

_LOOKS = 8  # from then on what is shared is not looked at
_CODE = frozenset({"method", "bound", "function", "partial"})
_EVERY = 8  # of later looks one is not quick
_LAYER = "function "  # before the number of a layer of the stage that is no module
_LIBRARIES = ("deepspeed.", "deepspeed_bamboo.runtime", "torch.")
_FIXED = (type, types.ModuleType, torch.dtype, torch.device, torch.Size)


def attributes_of_stage(module: torch.nn.Module) -> Iterator[tuple[Key, dict[str, Any]]]:
    """By key the dictionary that has it; what never changes by itself is left out."""
    for path, part in module.named_modules():
        if is_of_stage(module, path):
            of_a_library = f"{type(part).__module__}.".startswith(_LIBRARIES)
            for name, value in part.__dict__.items():
                if value.__class__ in PLAIN or isinstance(value, _FIXED) or is_foreign(name):
                    continue
                if not (of_a_library and name.startswith("_")):
                    yield (path, name), part.__dict__
    for path, function in _functions(module).items():
        yield (path, ""), {"": function}
        if isinstance(function, types.FunctionType):
            yield from (((path, name), function.__dict__) for name in function.__dict__)


def _functions(module: Any) -> dict[str, Any]:
    """The loss function, if it is this stage's, and layers that are no modules; by how messages name them."""
    functions = {f"{_LAYER}{index}": function for index, function in enumerate(getattr(module, "forward_funcs", ()))}
    if is_of_stage(module, LOSS):
        functions[LOSS] = module.__dict__.get(LOSS)
    return {
        path: function
        for path, function in functions.items()
        if function is not None and not isinstance(function, torch.nn.Module)
        if type(function) is not functools.partial and not source_of(function).startswith(_LIBRARIES)
    }


class PartsWhenAsked:
    """The :class:`Parts` of a stage, which are looked for (this takes milliseconds) when a tensor or module is met."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @functools.cached_property
    def _parts(self) -> Parts:
        return Parts.of(self._module)

    def path(self, module: Any) -> str | None:
        """See :meth:`Parts.path`."""
        return self._parts.path(module)

    def name(self, tensor: Any) -> str | None:
        """See :meth:`Parts.name`."""
        return self._parts.name(tensor)


@dataclass
class AttributeReading:
    """What the attributes of a stage hold at one moment."""

    keys: list[Key]
    graph: Graph
    objects: list[Any]
    versions: list[tuple[int, int]]

    @classmethod
    def of(
        cls, module: torch.nn.Module, *, leaving_out: Container[Key] = (), only: Container[Key] | None = None
    ) -> AttributeReading:
        """Of a stage."""
        held = [
            (key, holder)
            for key, holder in attributes_of_stage(module)
            if key not in leaving_out and (only is None or key in only)
        ]
        reader = Reader(PartsWhenAsked(module))
        for (_, name), holder in held:
            reader.root(holder[name])
        for place, node in enumerate(reader.graph.nodes):
            if node[0] == "noted":
                reader.objects[place] = None  # with its graph it takes memory, and nobody compares it
        return cls([key for key, _ in held], reader.graph, reader.objects, reader.graph.versions())

    def same_as(self, other: AttributeReading) -> bool:
        """Whether everything is what it is in ``other``."""
        return (
            self.keys == other.keys
            and self.versions == other.versions
            and self.graph.roots == other.graph.roots
            and self.graph.nodes == other.graph.nodes
        )

    def contents(self) -> dict[Key, list[Any]]:
        """By key what shows that an attribute has changed."""
        items = zip(self.keys, self.graph.roots, strict=True)
        return {key: self.graph.content(item, self.versions) for key, item in items}

    def can_change_inside(self) -> bool:
        """Whether anything can change without another object in its place."""
        return any(node[0] in MUTABLE for node in self.graph.nodes)

    def unknown(self, key: Key) -> list[str]:
        """What can't be sent of an attribute."""
        return self.graph.unknown(self.graph.roots[self.keys.index(key)])

    def is_module(self, key: Key) -> bool:
        """Whether an attribute is a module, which torch does not know of."""
        item = self.graph.roots[self.keys.index(key)]
        return item[0] == "ref" and isinstance(self.objects[item[1]], torch.nn.Module)

    def _looks_into(self, item: Form) -> bool:
        """Whether modules in it are its own; a method's, or what a function holds, may be parts of a whole model."""
        return item[0] == "ref" and self.graph.nodes[item[1]][0] not in _CODE

    def hidden(self) -> list[tuple[Key, str]]:
        """The attributes that hold what may differ on another worker, where nobody sees it move; and why."""
        own = {
            item[1] for item in self.graph.roots if item[0] == "ref" and source_for(self.objects[item[1]]) is not None
        }
        others = (place for place, node in enumerate(self.graph.nodes) if node[0] == "other" and place not in own)
        odd = {place: why for place in others if (why := _hides(self.objects[place])) is not None}
        items = ((key, item) for key, item in zip(self.keys, self.graph.roots, strict=True) if self._looks_into(item))
        found = ((key, odd.get(place)) for key, item in items if odd for place in self.graph.places(item))
        return [(key, why) for key, why in found if why is not None]

    def keys_of(self, ids: Container[int]) -> set[Key]:
        """The attributes that hold something of ``ids`` that can be changed."""
        found = set()
        for key, item in zip(self.keys, self.graph.roots, strict=True):
            places = self.graph.places(item)
            if any(_is_held(self.graph.nodes[place]) and id(self.objects[place]) in ids for place in places):
                found.add(key)
        return found

    def state(self) -> AttributeState:
        """As it is sent; tensors are copies. What can't be sent is left out."""
        items = zip(self.keys, self.graph.roots, strict=True)
        kinds = ((key, item, {node[0] for node in self.graph.reachable(item)}) for key, item in items)
        # A tensor with a graph is made again by the next forward.
        where = [[*key, item] for key, item, its in kinds if not its & {"other", "noted"}]
        tensors = [tensor.detach().clone() for tensor in self.graph.tensors]
        return {"nodes": self.graph.nodes, "where": where, "tensors": tensors}


def mutable_objects(module: torch.nn.Module) -> list[Any]:
    """All that attributes of this stage hold and that can be changed."""
    reading = AttributeReading.of(module)
    pairs = zip(reading.graph.nodes, reading.objects, strict=True)
    return [value for node, value in pairs if _is_held(node)]


def _is_held(node: Form) -> bool:
    """Whether it is one thing that two may hold."""
    return node[0] in MUTABLE or node[0] == "other"


def given_objects(module: Any) -> list[Any]:
    """All that the script has given to layers of any stage, or has in global variables, and that can be changed."""
    reader = Reader(Parts.of(module), contents=False)
    for spec in getattr(module, "_layer_specs", ()):
        if isinstance(spec, LayerSpec):
            reader.item([list(spec.module_args), dict(spec.module_kwargs)])
    for name in {type(part).__module__ for part in module.modules()}:
        if not f"{name}.".startswith(_LIBRARIES) and name in sys.modules:
            for variable, value in list(vars(sys.modules[name]).items()):
                if is_data(value) and not variable.startswith("__"):  # Python's own, like its builtins
                    reader.item(value)
    pairs = zip(reader.graph.nodes, reader.objects, strict=True)
    return [value for node, value in pairs if _is_held(node)]


def global_values(module: Any) -> dict[str, list[Any]]:
    """What is in global variables that forwards of a stage's layers, and its loss function, name; by name."""
    reader = Reader(Parts.of(module), globals_too=True)
    forwards = dict.fromkeys(type(part).forward for part in module.modules())
    for function in (*forwards, *_functions(module).values()):
        reader.root(function)
    versions = reader.graph.versions()
    classes = dict.fromkeys(type(part) for part in module.modules())
    own = [kind for kind in classes if not f"{kind.__module__}.".startswith(_LIBRARIES)]
    found = {
        f"{name} of class {kind.__name__}": reader.graph.content(reader.item(value), reader.graph.versions())
        for kind in own
        for name, value in vars(kind).items()
        if is_data(value) and not name.startswith("__")
    }
    functions = (node for node in reader.graph.nodes if node[0] == "function" and len(node) > 7)
    pairs = ((node, name, item) for node in functions for name, item in zip(node[7][::2], node[7][1::2], strict=True))
    return {**found, **{f"{name[1]} of {node[1]}": reader.graph.content(item, versions) for node, name, item in pairs}}


class MovingAttributes:
    """Of one stage: which of its attributes have ever changed."""

    def __init__(self) -> None:
        self._known: AttributeReading | None = None
        self._moving: set[Key] = set()
        self._given: list[Any] | None = None  # objects, so that their ids stay theirs
        self._others: list[Any] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._shared: set[Key] = set()
        self._classified: set[Key] = set()
        self._unsendable: list[str] = []
        self._odd: Counter[Key] = Counter()  # how often forwards have changed what can't be sent
        self._looks = 0

    def share(self, module: torch.nn.Module, other: torch.nn.Module) -> None:
        """What ``other``, a stage on the same worker, holds too, is not this stage's alone; ``module`` is this one."""
        held = {id(value) for value in mutable_objects(other)}
        self._others += [value for value in mutable_objects(module) if id(value) in held]
        self._classified.clear()

    def look(self, module: Any, *, by_script: bool) -> bool:
        """Whether what can be sent has changed since the last look; not in the first one.

        ``by_script``: between two steps, so that a change of what is shared was made on all workers.
        """
        self._looks += 1
        leaving_out = self._shared if self._looks > _LOOKS else ()
        if self._looks > _LOOKS + 1 and self._is_as_before():
            return False
        before, now = self._known, AttributeReading.of(module, leaving_out=leaving_out)
        self._known = now
        self._classify(module, now)
        self._note_values(module)
        if before is None:
            ready = _ready_made(module)
            hidden = [
                (key, why)
                for key, why in now.hidden()
                if key not in self._shared and not (now.is_module(key) and key[0].partition(".")[0] in ready)
            ]
            self._unsendable += [f"{_name(key)} ({why})" for key, why in hidden]
            return False
        if now.same_as(before):
            return False
        known = before.contents()
        changed = {key for key, its in now.contents().items() if key not in known or known[key] != its}
        unknown = {key for key in changed if key in self._shared or now.unknown(key)}
        if not by_script:
            self._odd.update(unknown)
            unknown_again = {key for key in unknown if self._odd[key] > 1}  # what is made once is so on all workers
            self._unsendable += [f"{_name(key)}{_why(key, now, self._shared)}" for key in sorted(unknown_again)]
        moved = {key for key in changed - unknown if not (by_script and _is_of_function(key))}
        self._moving |= moved
        return bool(moved)

    def _note_values(self, module: Any) -> None:
        """Where all is that is not shared, for :meth:`_is_as_before`; but for tensors with a graph."""
        pairs = ((key[1], holder) for key, holder in attributes_of_stage(module) if key not in self._shared)
        self._values = [(holder, name, holder[name]) for name, holder in pairs if not _has_graph(holder[name])]
        self._sizes = [(part.__dict__, len(part.__dict__)) for part in module.modules()]

    def _is_as_before(self) -> bool:
        """Whether all are the same objects, which can't change inside: a quick look, which does not see new layers."""
        if self._known is None or self._known.can_change_inside() or self._looks % _EVERY == 0:
            return False
        return all(len(holder) == size for holder, size in self._sizes) and all(
            holder.get(name) is value or (value.__class__ in ATOMS and holder.get(name) == value)
            for holder, name, value in self._values
        )

    def take_unsendable(self) -> list[str]:
        """What forwards have changed since the last call and can't be sent."""
        found, self._unsendable = self._unsendable, []
        return found

    @property
    def moves(self) -> bool:
        """Whether anything has ever changed."""
        return bool(self._moving)

    @property
    def at_risk(self) -> bool:
        """Whether anything has ever changed, or nobody has looked twice."""
        return bool(self._moving) or self._looks < 2

    def state(self, module: torch.nn.Module, *, moving_only: bool = True, here: bool = False) -> AttributeState | None:
        """Of what has ever moved, or of all; None for nothing. What is shared is left out.

        ``here``: for this replica itself. Others don't get what functions keep until a forward has moved it: functions
        are the script's, on every worker alike.
        """
        if moving_only and not self.at_risk:
            return None
        only = self._moving if moving_only and self._looks >= 2 else None
        functions = {key for key, _ in attributes_of_stage(module) if _is_of_function(key)}
        alike = set() if here else functions - self._moving
        reading = AttributeReading.of(module, leaving_out=self._shared | alike, only=only)
        return reading.state() if reading.keys else None

    def accept(self, module: Any, state: AttributeState | None, *, new_tensors: bool = False) -> None:
        """Bring the stage to what ``state`` says; what it has not, or shares, is left out.

        ``new_tensors``: see :func:`accept_hook_state`.
        """
        if state is None:
            return
        reading = AttributeReading.of(module)
        self._classify(module, reading)
        parts, device = Parts.of(module), device_of(module)
        fitting = Fitting(
            state["nodes"], state["tensors"], parts=parts, examples=Examples(reading.objects), device=device
        )
        fitting.new_tensors = new_tensors
        for path, name, item in state["where"]:
            if (path, name) not in self._shared:
                try:
                    _put(module, path, name, fitting, item)
                except LookupError as error:
                    if (path, name) in reading.keys and (path, name) not in self._moving:
                        continue  # made alike by its constructor
                    self._unsendable.append(f"{_name((path, name))} ({error} can't be made on another worker)")

    def refuse(self, problems: Iterable[str]) -> None:
        """What else of the stage this worker can't make, in words."""
        self._unsendable += problems

    def include(self, state: AttributeState | None) -> None:
        """It moves at the owner, so it will here, when this replica is an owner."""
        self._looks += 2
        for path, name, _ in () if state is None else state["where"]:
            if (path, name) in self._shared:
                self._unsendable.append(f"{_name((path, name))} (shared by stages)")
            else:
                self._moving.add((path, name))

    def _classify(self, module: Any, reading: AttributeReading) -> None:
        if self._classified.issuperset(reading.keys):
            return
        if self._given is None:
            self._given = given_objects(module)
        self._shared |= reading.keys_of({id(value) for value in (*self._given, *self._others)})
        self._classified.update(reading.keys)


def _ready_made(module: Any) -> set[str]:
    """The names of layers that the script has made itself, with what they hold, on every worker."""
    specs = enumerate(getattr(module, "_layer_specs", ()))
    return {str(index) for index, spec in specs if not isinstance(spec, LayerSpec)}


def _put(module: torch.nn.Module, path: str, name: str, fitting: Fitting, item: Form) -> None:
    function = _functions(module).get(path)
    if function is not None and not name:
        fitting.root(item, function)  # in its place: the script has it, too
        return
    if function is not None:
        vars(function)[name] = fitting.root(item, vars(function).get(name))
        return
    try:
        holder = module.get_submodule(path).__dict__
    except AttributeError:
        return
    holder[name] = fitting.root(item, holder.get(name))


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def _hides(value: Any) -> str | None:
    """Why what is in ``value`` can't be followed; None for what is taken to be the same everywhere (a lock, a file)."""
    if isinstance(value, torch.nn.Module):
        return "modules that are not registered" if next(value.parameters(), None) is not None else None
    kind = type(value)
    if isinstance(value, KINDS):
        return f"a generator of the class {kind.__name__}"
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return f"an iterator: {kind.__name__}"
    slots = any(vars(base).get("__slots__") for base in kind.__mro__[:-1])
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return f"an object with __slots__: {kind.__name__}" if slots and not frozen and is_the_scripts(kind) else None


def _is_of_function(key: Key) -> bool:
    """Whether it is what the loss function, or a layer that is no module, keeps."""
    return key[0] == LOSS or key[0].startswith(_LAYER)


def _name(key: Key) -> str:
    path, name = key
    if path == LOSS or path.startswith(_LAYER):
        of = "the loss function" if path == LOSS else path
        return f"{of} ({name})" if name else of
    return f"attribute {name!r} of layer {path}"


def _why(key: Key, reading: AttributeReading, shared: Container[Key]) -> str:
    if key in shared:
        return " (which other layers, or the script, have too)"
    return f" (holds {', '.join(reading.unknown(key))})"
