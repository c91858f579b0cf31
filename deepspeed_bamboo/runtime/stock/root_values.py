"""What a script sets on its PipelineModule itself: when to recompute activations, or an attribute of a subclass.

A script has one PipelineModule, a worker several: one for each stage that it hosts, and for each shadow. The scripts of
all workers do the same, so what one sets there goes to all of its own worker's.

It may set that on ``engine.module``, which is that of the stage that the engine shows, or on what it gave
``initialize``, whose stage may be elsewhere by now.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.stock.description import is_torchs
from deepspeed_bamboo.runtime.stock.rebinding import own_beside_layers, rebound
from deepspeed_bamboo.runtime.stock.script_hooks import LOSS
from deepspeed_bamboo.runtime.stock.written import SetOnRoot

_PLAIN = (bool, int, float, str)
_INTERVAL = "activation_checkpoint_interval"
_SETTABLE = frozenset(
    {_INTERVAL, "activation_checkpoint_func", "checkpointable_layers", LOSS} | {"seed_layers", "seed_fn", "base_seed"}
)
"""What a script may set of what every PipelineModule has. All else of that belongs to a stage, or is followed apart."""
_GROWING = (list, dict, set, deque)


class RootByHand:
    """For one worker; see the module.

    Args:
        tell: called with a sentence about what a forward keeps there, which no other worker gets.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._given: weakref.ReferenceType[Any] | None = None  # to initialize: the first that is shown
        self._left: dict[int, tuple[weakref.ReferenceType[Any], dict[str, Any]]] = {}  # by source, by id
        self._sized, self._sizes = 0, dict[str, int]()  # of the one that was shown, by id
        self._moved: set[str] = set()  # by forwards

    def follow(self, source: Any, modules: Iterable[Any]) -> tuple[SetOnRoot, ...]:
        """Before a step. ``source``: the module that is shown. Returns what the script has set since."""
        sources = self._sources(source)
        now = [_settable(one) for one in sources]
        # All before the first is written: what comes from another one is nothing that the script has set there.
        found = [(one, self._known(one), self._changed(one, its)) for one, its in zip(sources, now, strict=True)]
        for one, _, changed in found:
            for module in _all(modules, sources) if changed else ():
                if module is not one:
                    for name, value in changed.items():
                        _give(module, name, value, source=one)
                    if one.is_checkpointable_results_interval == changed.get(_INTERVAL, -1):
                        module._precompute_checkpointable_values()
        self._note(source)
        return tuple(
            SetOnRoot(weakref.ref(one), name, (left[name],) if name in left else (), value)
            for one, left, changed in found
            for name, value in changed.items()
        )

    def come_back(
        self, source: Any, modules: Iterable[Any], of_the_job: Iterable[tuple[Any, Mapping[str, Any]]]
    ) -> None:
        """The script has come to the job's step. ``of_the_job``: what the job's state has on modules."""
        for module, values in of_the_job:
            module.__dict__.update(values)
            self._known(module).update(values)
        self.follow(source, modules)

    def write_again(self, source: Any, modules: Iterable[Any], changes: Sequence[SetOnRoot]) -> None:
        """What :meth:`follow` has returned, before a step that is done again."""
        self._set(_all(modules, self._sources(source)), [(change, (change.now,)) for change in changes])
        self._note(source)

    def restored(self, source: Any, modules: Iterable[Any], changes: Sequence[SetOnRoot]) -> None:
        """The stages have a state of before ``changes``."""
        self._set(_all(modules, self._sources(source)), [(change, change.before) for change in reversed(changes)])
        self._note(source)

    def _set(self, modules: Iterable[Any], changes: Sequence[tuple[SetOnRoot, tuple[Any, ...]]]) -> None:
        for module in modules:
            for change, values in changes:
                if change.name in self._moved:
                    continue
                if not values:
                    module.__dict__.pop(change.name, None)
                for value in values:
                    _give(module, change.name, value, source=change.source())
                if change.name == _INTERVAL:
                    module._precompute_checkpointable_values()

    def leave(self, source: Any) -> None:
        """After a step, in which forwards may have changed something."""
        for one in self._sources(source):
            self._moved |= self._changed(one, _settable(one)).keys()
        now, sizes = _settable(source), self._sizes if self._known(source) and self._sized == id(source) else {}
        grown = [name for name, size in sizes.items() if name in now and len(now[name]) != size]
        if grown and source.stage_id == 0:
            self._tell(
                f"a forward changes {', '.join(grown)} of the PipelineModule ({type(source).__name__}) itself, of "
                "which each worker has its own: a stage taken over goes on with that of its new worker. Keep what a "
                "forward reads in a layer, or in a buffer"
            )
        self._note(source)

    def _sources(self, shown: Any) -> list[Any]:
        """What the script may set something on."""
        given = None if self._given is None else self._given()
        return [shown] if given is None or given is shown else [shown, given]

    def _known(self, source: Any) -> dict[str, Any]:
        """What was left there; {} of one that was no source then."""
        ref, left = self._left.get(id(source), (None, {}))
        return left if ref is not None and ref() is source else {}

    def _changed(self, source: Any, now: dict[str, Any]) -> dict[str, Any]:
        left = self._known(source)
        if not left:
            return {}
        return {n: v for n, v in now.items() if n not in self._moved and not _same(left.get(n), v)}

    def _note(self, shown: Any) -> None:
        if self._given is None:
            self._given = weakref.ref(shown)
        self._left = {id(one): (weakref.ref(one), _settable(one)) for one in self._sources(shown)}
        now = self._left[id(shown)][1]
        self._sized = id(shown)
        self._sizes = {name: len(value) for name, value in now.items() if isinstance(value, _GROWING)}


def _all(modules: Iterable[Any], sources: Iterable[Any]) -> list[Any]:
    """Each once; also a source whose stage is elsewhere: the script reads there what it has set."""
    return list({id(module): module for module in (*modules, *sources)}.values())


def module_of_script(host: Any) -> Any:
    """The PipelineModule that the script of the worker with this StageHost has, also where it stands by."""
    shown = host.shown() or host.active
    return None if shown is None else shown.module


def own_of_root(module: Any) -> Iterator[tuple[str, Any]]:
    """What a PipelineModule has that no other one has: attributes of a subclass."""
    known = _names_of_every_one()
    return ((name, value) for name, value in module.__dict__.items() if name not in known and not is_torchs(name))


def _settable(module: Any) -> dict[str, Any]:
    found = {n: module.__dict__[n] for n in _SETTABLE if n in module.__dict__}
    if isinstance(module._modules.get(LOSS), torch.nn.Module):
        found[LOSS] = module._modules[LOSS]
    return {**found, **dict(own_of_root(module))}


def _give(module: Any, name: str, value: Any, *, source: Any) -> None:
    """Let ``module`` have what the script has set on ``source``. torch keeps a loss that is a Module elsewhere."""
    if isinstance(value, torch.nn.Module):
        setattr(module, name, value if module is source else own_beside_layers(value))
        return
    if name == LOSS:
        module._modules.pop(LOSS, None)
    module.__dict__[name] = value if source is None else rebound(value, old=source, new=module)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one.__class__ is other.__class__ and one.__class__ in _PLAIN and one == other)


@functools.cache
def _names_of_every_one() -> frozenset[str]:
    functions = (its for its in vars(PipelineModule).values() if isinstance(its, types.FunctionType))
    return frozenset((LOSS, *(name for function in functions for name in _names(function.__code__))))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
