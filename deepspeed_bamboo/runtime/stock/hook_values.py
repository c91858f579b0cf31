"""What hooks of a stage keep from call to call: counts, averages, masks, in closures, objects and defaults.

A shadow needs them as its owner has them when a step begins, as it does attributes of layers (``plain_values.py``).
What has ever moved goes to shadows with the gradients of each step; all of it goes with a stage's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.held_fitting import Examples, Fitting
from deepspeed_bamboo.runtime.stock.held_values import MUTABLE, Graph, Reader
from deepspeed_bamboo.runtime.stock.plain_forms import Form, Parts, device_of
from deepspeed_bamboo.runtime.stock.script_hooks import ScriptHook, hooks_of_stage

HookState = dict[str, Any]
"""``nodes`` and ``tensors`` of a graph (``held_values.py``), tensors None where they have not moved; ``where`` has for
each hook the path of its holder, its kind, its place among those, and its item, None for one that can't be sent."""


@dataclass
class HookReading:
    """What the hooks of a stage hold at one moment."""

    hooks: list[ScriptHook]
    graph: Graph
    objects: list[Any]
    versions: list[tuple[int, int]]  # of the tensors: what shows that one has other values, or is another one

    def signature(self, place: int) -> Form:
        """What hook number ``place`` is, without what it keeps; and what of that can't be sent."""
        item = self.graph.roots[place]
        unknown = self.graph.unknown(item)
        sign = _signature(self.graph, item)
        return ["holding", *unknown, "in", *sign] if unknown and sign[0] != "other" else sign

    def signatures(self) -> dict[str, dict[str, list[Form]]]:
        """Of all hooks, by path and kind."""
        found: dict[str, dict[str, list[Form]]] = {}
        for place, hook in enumerate(self.hooks):
            found.setdefault(hook.path, {}).setdefault(hook.kind, []).append(self.signature(place))
        return found

    def state(self, *, tensors: Sequence[torch.Tensor] | None) -> HookState:
        """As it is sent."""
        items = [None if self.graph.unknown(item) else item for item in self.graph.roots]
        where = [[hook.path, hook.kind, hook.place, item] for hook, item in zip(self.hooks, items, strict=True)]
        return {"nodes": self.graph.nodes, "where": where, "tensors": None if tensors is None else list(tensors)}


def _signature(graph: Graph, item: Form) -> Form:
    if item[0] == "plain":
        return item
    node = graph.nodes[item[1]]
    if node[0] == "function":
        return node[:5]
    if node[0] == "method":
        return ["method", *_signature(graph, node[1]), node[2]]
    if node[0] == "partial":
        return ["partial", *_signature(graph, node[1])]
    return node[:2]


def read_hooks(module: torch.nn.Module, parts: Parts | None = None, *, globals_too: bool = False) -> HookReading | None:
    """Of a stage; None where it has no hooks of the script's."""
    hooks = hooks_of_stage(module)
    if not hooks:
        return None
    reader = Reader(parts or Parts.of(module), globals_too=globals_too)
    for hook in hooks:
        reader.root(hook.function)
    return HookReading(hooks, reader.graph, reader.objects, reader.graph.versions())


def hook_state(module: torch.nn.Module, *, host: bool = False) -> HookState | None:
    """All that hooks keep, with copies of tensors, ``host``: in the host's memory; None where there are no hooks."""
    reading = read_hooks(module)
    if reading is None:
        return None
    copies = [tensor.detach().clone() for tensor in reading.graph.tensors]
    return reading.state(tensors=[tensor.cpu() for tensor in copies] if host else copies)


def examples_of(modules: Iterable[torch.nn.Module]) -> Examples:
    """What hooks of these stages hold, from which others can be made."""
    readings = [read_hooks(module) for module in modules]
    return Examples([value for reading in readings if reading is not None for value in reading.objects])


def made_hooks(
    state: HookState, *, parts: Parts, examples: Examples, device: torch.device
) -> dict[tuple[str, str], list[Any]]:
    """New hooks for a stage with ``parts``, by path and kind; None in the place of one that can't be made."""
    fitting = Fitting(state["nodes"], state["tensors"], parts=parts, examples=examples, device=device)
    made: dict[tuple[str, str], list[Any]] = {}
    for path, kind, _, item in state["where"]:
        try:
            hook = None if item is None else fitting.root(item)
        except LookupError:
            hook = None
        made.setdefault((path, kind), []).append(hook)
    return made


def accept_hook_state(module: torch.nn.Module, state: HookState | None, *, new_tensors: bool = False) -> None:
    """Bring the hooks of a replica to what ``state`` says; what it has not is left out.

    ``new_tensors``: in the place of tensors come others, with these values; else tensors are changed in place.
    """
    reading = None if state is None else read_hooks(module)
    if state is None or reading is None:
        return
    parts, known = Parts.of(module), {(hook.path, hook.kind, hook.place): hook for hook in reading.hooks}
    examples, device = Examples(reading.objects), device_of(module)
    fitting = Fitting(state["nodes"], state["tensors"], parts=parts, examples=examples, device=device)
    fitting.new_tensors = new_tensors
    for path, kind, place, item in state["where"]:
        hook = known.get((path, kind, place))
        if hook is not None and item is not None:
            hook.replace(fitting.root(item, hook.function))


def separate_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Give each stage values of its own where hooks of several stages on this worker hold the same.

    On a worker for each stage they have them from the beginning. Call it before the first forward.
    """
    seen: set[int] = set()
    kept: list[Any] = []  # so that their ids stay theirs
    for module in modules:
        reading = read_hooks(module)
        if reading is None:
            continue
        if _mutable(reading) & seen:
            tensors = [tensor.detach().clone() for tensor in reading.graph.tensors]
            state = reading.state(tensors=tensors)
            parts, examples = Parts.of(module), Examples(reading.objects)
            made = made_hooks(state, parts=parts, examples=examples, device=device_of(module))
            for hook in reading.hooks:
                new = made[hook.path, hook.kind][hook.place]
                hook.replace(hook.function if new is None else new)
        seen |= _mutable(reading)
        kept.append(reading)


def _mutable(reading: HookReading) -> set[int]:
    pairs = zip(reading.graph.nodes, reading.objects, strict=True)
    return {id(value) for node, value in pairs if node[0] in MUTABLE}


class MovingHooks:
    """Of one stage: whether what its hooks keep has ever changed."""

    def __init__(self) -> None:
        self._known: HookReading | None = None
        self._moving = self._tensors_move = False
        self._unsendable: list[str] = []
        self._looks = 0

    @property
    def at_risk(self) -> bool:
        """Whether anything has ever changed, or nobody has looked twice."""
        return self._moving or self._looks < 2

    def look(self, module: torch.nn.Module) -> bool:
        """Whether it has changed since the last look; not in the first one."""
        before, now = self._known, read_hooks(module)
        self._known = now
        self._looks += 1
        if before is None or now is None:
            return False
        tensors = before.versions != now.versions
        changed = tensors or before.graph.nodes != now.graph.nodes
        if changed:
            self._unsendable += unsendable_changes(before, now)
        self._moving, self._tensors_move = self._moving or changed, self._tensors_move or tensors
        return changed

    def take_unsendable(self) -> list[str]:
        """What has changed since the last call and can't be sent."""
        found, self._unsendable = self._unsendable, []
        return found

    def include(self, state: HookState | None) -> None:
        """It moves at the owner, so it will here, when this replica is an owner."""
        self._looks += 2
        if state is not None:
            self._moving, self._tensors_move = True, self._tensors_move or state["tensors"] is not None

    def state(self) -> HookState | None:
        """What the last look saw, if it has ever moved; tensors are the hooks' own."""
        if not self._moving or self._known is None:
            return None
        tensors = [tensor.detach() for tensor in self._known.graph.tensors]
        return self._known.state(tensors=tensors if self._tensors_move else None)


def unsendable_changes(before: HookReading | None, now: HookReading | None) -> list[str]:
    """What has changed of what hooks keep and can't be sent: values beside an object that can't, global variables."""
    if before is None or now is None:
        return []
    found = [
        f"{hook.name} (holds {', '.join(unknown)})"
        for place, hook in enumerate(now.hooks)
        if (unknown := now.graph.unknown(now.graph.roots[place])) and _changed(before, now, place)
    ]
    names = dict(_globals(before))
    moved = [name for name, its in _globals(now) if names.get(name, its) != its]
    return [*found, *(f"the global variable {name}" for name in dict.fromkeys(moved))]


def _changed(before: HookReading, now: HookReading, place: int) -> bool:
    return place < len(before.hooks) and _content(before, before.graph.roots[place]) != _content(
        now, now.graph.roots[place]
    )


def _content(reading: HookReading, item: Form) -> list[Any]:
    return reading.graph.content(item, reading.versions)


def _globals(reading: HookReading) -> Iterator[tuple[str, list[Any]]]:
    for node in reading.graph.nodes:
        if node[0] == "function" and len(node) > 7:
            for name, item in zip(node[7][::2], node[7][1::2], strict=True):
                yield f"{name[1]} of {node[1]}", [item if item[0] == "plain" else None, *_content(reading, item)]
