"""Hooks that a script puts on its PipelineModule itself, or takes from it, after ``initialize``.

A script has one PipelineModule, a worker one for each stage and each shadow. The scripts of all workers do the same, so
what one does there is done to all of its own worker's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.likeness import register_on_module
from deepspeed_bamboo.runtime.stock.root_values import module_of_script
from deepspeed_bamboo.runtime.stock.script_hooks import MODULE_HOOKS, hook_options, hooks_of, keys_of_hooks

_Keys = Mapping[str, list[int]]
"""By kind of hook under which keys torch has the script's."""


@dataclass(frozen=True)
class _Edit:
    """What the script has done to the hooks of one kind: which it has taken away, by position, and which are new."""

    before: int
    removed: list[int]
    added: Sequence[tuple[Any, Mapping[str, bool]]]


class RootHooks:
    """For one worker; see the module."""

    def __init__(self, host: StageHost) -> None:
        self._host = host
        self._given: weakref.ReferenceType[Any] | None = None  # to initialize: the first that is shown
        self._known: list[tuple[weakref.ReferenceType[Any], _Keys]] = []  # by source
        self.carry()

    def carry(self) -> None:
        """Do to the other modules of this worker what the script has done to its own since the last call.

        Its own is ``engine.module``, and what it gave ``initialize``, whose stage may be elsewhere by now.
        """
        sources = self._sources()
        known = {id(one): keys for ref, keys in self._known for one in sources if ref() is one}
        edits = {id(one): _edits(one, known[id(one)]) for one in sources if id(one) in known}
        if any(edits.values()):
            modules = {id(module): module for module in (*(its.module for its in self._host.built()), *sources)}
            before = {key: known.get(key) or _keys(module) for key, module in modules.items()}
            for key, module in modules.items():
                for source, its in edits.items():
                    if source != key:
                        _follow(module, its, before[key])
        self._known = [(weakref.ref(one), _keys(one)) for one in sources]

    def _sources(self) -> list[Any]:
        shown = module_of_script(self._host)
        if self._given is None and shown is not None:
            self._given = weakref.ref(shown)
        given = None if self._given is None else self._given()
        return [one for one in dict.fromkeys((shown, given)) if one is not None]


def _keys(module: Any) -> _Keys:
    return {kind: keys_of_hooks(module, kind) for kind in MODULE_HOOKS}


def _edits(source: Any, known: _Keys) -> dict[str, _Edit]:
    """By kind; only where there is something."""
    found = {}
    for kind, before in known.items():
        now = keys_of_hooks(source, kind)
        if now != before:
            pairs = zip(now, hooks_of(source, kind), hook_options(source, kind), strict=True)
            added = [(hook, options) for key, hook, options in pairs if key not in before]
            found[kind] = _Edit(len(before), [i for i, key in enumerate(before) if key not in now], added)
    return found


def _follow(module: Any, edits: Mapping[str, _Edit], before: _Keys) -> None:
    for kind, edit in edits.items():
        keys = before[kind]
        if len(keys) != edit.before:
            continue  # made since then, with the hooks that the script's has now
        for position in edit.removed:
            getattr(module, kind).pop(keys[position], None)
        for hook, options in edit.added:
            register_on_module(module, kind, hook, options)
