"""Which iterators have served evaluations, and how far they are; none is kept alive for that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from deepspeed_bamboo.runtime.iteration.evaluation_position import EvaluationPositions


def numbers() -> Iterator[int]:
    yield from range(100)


def test_each_iterator_is_counted_for_itself() -> None:
    positions, one, other = EvaluationPositions(), numbers(), numbers()
    assert positions.of(one) == positions.of(None) == 0
    positions.advance(one, 3)
    positions.advance(other, 2)
    positions.advance(one, 3)
    positions.advance(None, 5)
    assert (positions.of(one), positions.of(other), positions.of(numbers()), positions.of(None)) == (6, 2, 0, 0)


def test_what_is_skipped_is_taken() -> None:
    positions, one = EvaluationPositions(), numbers()
    positions.skip(one, 4)
    positions.skip(one, 0)
    positions.skip(None, 4)
    assert next(one) == 4 and positions.of(one) == 4


def test_iterators_are_not_kept_alive() -> None:
    positions, one = EvaluationPositions(), numbers()
    positions.advance(one, 1)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    # A list's iterator can't be referred to weakly: the last one is kept.
    first, second, kept = iter([1, 2]), iter([3]), numbers()
    positions.advance(kept, 7)
    positions.advance(first, 1)
    positions.advance(second, 1)
    assert (positions.of(first), positions.of(second), positions.of(kept)) == (0, 1, 7)
