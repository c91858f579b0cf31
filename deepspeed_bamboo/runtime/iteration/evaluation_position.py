"""How far iterators for ``eval_batch`` have been used, in all and in this step, so that others' continue there, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_bamboo.runtime.iteration.micro_batches import Transform, read_past


@dataclass(frozen=True)
class _Position:
    """Of an iterator: what it has given in all, and had given when the first evaluation of ``step`` began."""

    iterator: Callable[[], Any]
    count: int
    step: int = -1
    before: int = 0


class EvaluationPositions:
    """Counts micro-batches by iterator: this very object, not one that is equal.

    It keeps no iterator alive, for a loader's has processes; but for the last one of a kind that can't be referred to
    weakly, such as a list's or a ``map``.
    """

    def __init__(self) -> None:
        self._used: list[_Position] = []

    def of(self, iterator: Iterator[Any] | None) -> int:
        """How many micro-batches ``iterator`` has given so far; 0 for one that is new here."""
        known = self._known(iterator)
        return 0 if known is None else known.count

    def in_step(self, iterator: Iterator[Any] | None, step: int) -> int:
        """How many of them in evaluations before ``step``, since the one before it was trained."""
        known = self._known(iterator)
        return known.count - known.before if known is not None and known.step == step else 0

    def advance(self, iterator: Iterator[Any] | None, micro_batches: int) -> None:
        """So many more have been taken from ``iterator``."""
        if iterator is not None:
            known = self._known(iterator) or _Position(_reference(iterator), 0)
            self._note(replace(known, count=known.count + micro_batches), iterator)

    def agree(self, iterator: Iterator[Any] | None, step: int, *, taken: int) -> None:
        """All know now that so many have been taken before ``step``, see :meth:`in_step`."""
        if iterator is not None:
            known = self._known(iterator) or _Position(_reference(iterator), 0)
            self._note(replace(known, step=step, before=known.count - taken), iterator)

    def _known(self, iterator: Iterator[Any] | None) -> _Position | None:
        return next((its for its in self._used if iterator is not None and its.iterator() is iterator), None)

    def _note(self, position: _Position, iterator: Iterator[Any]) -> None:
        weak = isinstance(position.iterator, weakref.ref)
        known = [(kept, its) for its in self._used if (kept := its.iterator()) is not None]
        others = [its for kept, its in known if kept is not iterator]
        self._used = [its for its in others if weak or isinstance(its.iterator, weakref.ref)] + [position]

    def skip(self, iterator: Iterator[Any] | None, micro_batches: int, *, transform: Transform = None) -> None:
        """Take so many from ``iterator``, as far as it has them, let ``transform`` see them, and throw them away."""
        if iterator is not None and micro_batches > 0:
            with suppress(StopIteration):
                for _ in range(micro_batches):
                    read_past(iterator, transform)
            self.advance(iterator, micro_batches)


def _reference(iterator: Iterator[Any]) -> Callable[[], Any]:
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator
