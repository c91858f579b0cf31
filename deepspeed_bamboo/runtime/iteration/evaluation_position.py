"""How far iterators for ``eval_batch`` have been used, so that a late worker's continues where the others' are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from deepspeed_bamboo.runtime.iteration.micro_batches import Transform, read_past


class EvaluationPositions:
    """Counts micro-batches by iterator: this very object, not one that is equal.

    It keeps no iterator alive, for a loader's has processes; but for the last one of a kind that can't be referred to
    weakly, such as a list's or a ``map``.
    """

    def __init__(self) -> None:
        self._used: list[tuple[Callable[[], Any], int]] = []

    def of(self, iterator: Iterator[Any] | None) -> int:
        """How many micro-batches ``iterator`` has given so far; 0 for one that is new here."""
        return next((count for known, count in self._used if iterator is not None and known() is iterator), 0)

    def advance(self, iterator: Iterator[Any] | None, micro_batches: int) -> None:
        """So many more have been taken from ``iterator``."""
        if iterator is None:
            return
        count = self.of(iterator) + micro_batches
        reference = _reference(iterator)
        weak = isinstance(reference, weakref.ref)
        known = [(kept, entry) for entry in self._used if (kept := entry[0]()) is not None]
        others = [entry for kept, entry in known if kept is not iterator]
        self._used = [entry for entry in others if weak or isinstance(entry[0], weakref.ref)] + [(reference, count)]

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
