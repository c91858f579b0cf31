"""Notices whether samples, or what makes a batch of them, draw random numbers, in whatever process they are read."""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from deepspeed_bamboo.runtime.stock.random_sources import sources_within

Value = TypeVar("Value")


class WatchedSamples(torch.utils.data.Dataset[Any]):
    """``dataset``, with all that it has; its samples are the same.

    Looks at the global generators of torch, Python and numpy after each sample, or each batch, until the first draw. A
    data set that has generators of its own counts as drawing from the start, and so does a ``collate`` function.
    """

    def __init__(self, dataset: Any, *, collate: Callable[[Any], Any] | None = None) -> None:
        self.watched = dataset
        self._collate = collate
        self.sources = [*sources_within(dataset), *([] if collate is None else sources_within(collate))]
        # Readable here when a loader's helper process has written it.
        self._drawn = multiprocessing.RawValue("b", bool(self.sources))

    @property
    def draw(self) -> bool:
        """Whether a sample has drawn random numbers."""
        return bool(self._drawn.value)

    def __len__(self) -> int:
        return len(self.watched)

    def __getitem__(self, index: Any) -> Any:
        """One sample, or whatever the data set gives for ``index``: a slice is its own affair."""
        return self._looking(lambda: self.watched[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """As a DataLoader reads a batch."""
        return self._looking(lambda: self._read(indices))

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """The function that makes a batch of samples, looked at likewise; None where there is none."""
        return None if self._collate is None else self._collated

    def _collated(self, samples: Any) -> Any:
        function = self._collate
        return samples if function is None else self._looking(lambda: function(samples))

    def _looking(self, read: Callable[[], Value]) -> Value:
        if self.draw:
            return read()
        before = _fingerprint()
        value = read()
        if _fingerprint() != before:
            self._drawn.value = True
        return value

    def _read(self, indices: Sequence[Any]) -> list[Any]:
        together = getattr(self.watched, "__getitems__", None)
        return list(together(indices)) if callable(together) else [self.watched[index] for index in indices]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.watched)

    def __getattr__(self, name: str) -> Any:
        if name == "watched":  # while it is being made from a pickle
            raise AttributeError(name)
        return getattr(self.watched, name)


def _fingerprint() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    host = torch.get_rng_state().numpy().tobytes()
    drawn = None if numpy is None else _numbers(numpy.random.get_state())
    return host, random.getstate(), drawn


def _numbers(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return name, keys.tobytes(), *rest
