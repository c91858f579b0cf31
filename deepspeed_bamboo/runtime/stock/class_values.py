"""What constructors of layers count in their classes and in global variables.

A layer may number itself by a counter of its class (``Block.made += 1``). Each stage has its own process in stock
DeepSpeed, so each begins to count at the same number. Several stages of one worker, and shadows, have to begin there.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.plain_values import PLAIN

BEGINNING = "bamboo_class_values"
"""Under which name a module keeps, until ``initialize``, those of before it was made."""
_LIBRARIES = frozenset({"torch", "deepspeed", "deepspeed_bamboo"})
_NUMBERS = (int, float)
_MOST_ITEMS = 1000
_MISSING = object()


@dataclass(frozen=True)
class ClassValues:
    """Numbers, and what counts them, at one moment, in classes of layers and in the modules that define them."""

    values: tuple[tuple[Any, dict[str, Any]], ...]
    contents: tuple[tuple[Any, Any], ...] = ()
    """Lists and dictionaries of numbers and texts there, and what was in them."""

    @classmethod
    def now(cls) -> ClassValues:
        """All that this process knows."""
        owners = list(_owners())
        return cls(tuple((owner, _numbers(owner)) for owner in owners), tuple(_contents(owners)))

    def restore(self) -> None:
        """Make them what they were. What classes have got since goes; modules keep it, since it may be in use."""
        for owner, before in self.values:
            for name in {*before, *_numbers(owner)}:
                value = before.get(name, _MISSING)
                current = vars(owner).get(name, _MISSING)
                if value is _MISSING:
                    if isinstance(owner, type):
                        delattr(owner, name)
                elif current is not value and not _equal_numbers(current, value):
                    setattr(owner, name, _same_count(value) if isinstance(value, itertools.count) else value)
        for container, before in self.contents:
            if not _same_items(container, before):
                _fill(container, before)

    def kept(self) -> KeptValues:
        """What is now, of whatever kind, in all places that :meth:`restore` may change."""
        names = ((owner, name, vars(owner).get(name, _MISSING)) for owner, its in self.values for name in its)
        return KeptValues(tuple(names), tuple((container, container.copy()) for container, _ in self.contents))


@dataclass(frozen=True)
class KeptValues:
    """By place the very objects that were there."""

    names: tuple[tuple[Any, str, Any], ...]
    contents: tuple[tuple[Any, Any], ...]

    def restore(self) -> None:
        """Put them back."""
        for owner, name, value in self.names:
            if value is not _MISSING and vars(owner).get(name, _MISSING) is not value:
                setattr(owner, name, value)
        for container, before in self.contents:
            _fill(container, before)


@contextmanager
def counting_from(beginning: ClassValues | None) -> Iterator[None]:
    """Inside, they are what they were at the ``beginning`` (None: what they are now); afterwards as before the block.

    For replicas, of which the script knows nothing.
    """
    before = ClassValues.now()
    kept = None if beginning is None else beginning.kept()
    if beginning is not None:
        beginning.restore()
    try:
        yield
    finally:
        before.restore()
        if kept is not None:
            kept.restore()  # what a script keeps there now may be no number any more


def _same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    one, other = (list(its.items() if isinstance(its, dict) else enumerate(its)) for its in (container, before))
    return all(
        (key is old_key or key == old_key) and (value is old or (type(value) in PLAIN and value == old))
        for (key, value), (old_key, old) in zip(one, other, strict=True)
    )


def _fill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(items)


def _equal_numbers(one: Any, other: Any) -> bool:
    return isinstance(one, _NUMBERS) and type(one) is type(other) and one == other


def _numbers(owner: Any) -> dict[str, Any]:
    found = {}
    for name, value in vars(owner).items():
        if isinstance(value, _NUMBERS) and not isinstance(value, bool):
            found[name] = value
        elif isinstance(value, itertools.count):
            found[name] = _same_count(value)
    return found


def _contents(owners: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Of the short ones; each with a copy."""
    for owner in owners:
        for name, value in vars(owner).items():
            if type(value) not in (list, dict) or len(value) > _MOST_ITEMS or name.startswith("__"):
                continue
            items = value.values() if isinstance(value, dict) else value
            if all(type(item) in PLAIN for item in items):
                yield value, value.copy()


def _same_count(value: Any) -> Any:
    """One that counts on from the same number; it can't be copied in later versions of Python."""
    return itertools.count(*ast.literal_eval(f"({repr(value)[len('count(') : -1]},)"))


def _owners() -> Iterator[Any]:
    """Classes of layers that are neither torch's nor DeepSpeed's, and the modules they are from."""
    classes: dict[type, None] = dict.fromkeys(_below(torch.nn.Module))
    own = [one for one in classes if _is_own(one)]
    yield from own
    for name in dict.fromkeys(one.__module__ for one in own):
        if name in sys.modules:
            yield sys.modules[name]


def _below(base: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(base)
    for one in subclasses:
        yield one
        yield from _below(one)


def _is_own(one: type) -> bool:
    return one.__module__.partition(".")[0] not in _LIBRARIES
