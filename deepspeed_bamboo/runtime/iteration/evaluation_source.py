"""Data for evaluations by ``engine.set_data_source(..., evaluation=...)``: several calls of a step are one round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from deepspeed_bamboo.runtime.iteration.micro_batches import DataFactory


class _Counted(Iterator[Any]):
    """An iterator that knows how far it is."""

    def __init__(self, iterator: Iterator[Any], *, step: int) -> None:
        self._iterator = iterator
        self.step = step
        self.position = 0

    def __next__(self) -> Any:
        value = next(self._iterator)
        self.position += 1
        return value


class EvaluationSource:
    """The script's factory, whose iterators continue within a round as the script's own iterator does.

    Args:
        factory: the script's.
    """

    def __init__(self, factory: DataFactory) -> None:
        self._factory = factory
        self._passed = 0
        self._open: dict[int, _Counted] = {}  # by pipeline

    def begin(self, *, passed: int) -> None:
        """An evaluation begins whose iterator has given so many micro-batches in this step already."""
        self._passed = passed

    def end_round(self) -> None:
        """Keep nothing alive while the job trains, for a loader may have processes."""
        self._open.clear()

    def __call__(self, pipeline: int, step: int) -> Iterator[Any]:
        """An iterator over what the evaluation that has begun needs of ``pipeline``."""
        known = self._open.get(pipeline)
        if known is None or known.step != step or known.position > self._passed:
            known = self._open[pipeline] = _Counted(self._factory(pipeline, step), step=step)
        with suppress(StopIteration):  # who reads the next one says it
            while known.position < self._passed:
                next(known)
        return known
