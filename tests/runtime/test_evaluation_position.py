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


def test_what_was_taken_in_a_step_is_counted_from_its_first_evaluation() -> None:
    positions, one, other = EvaluationPositions(), numbers(), numbers()
    positions.skip(one, 4)  # before this worker came
    assert positions.in_step(one, 3) == 0
    for taken in (0, 2, 4):
        assert positions.in_step(one, 3) == taken
        positions.agree(one, 3, taken=taken)
        positions.advance(one, 2)
    assert (positions.in_step(one, 3), positions.in_step(one, 4), positions.of(one)) == (6, 0, 10)
    positions.agree(other, 3, taken=8)  # others have taken more of theirs
    positions.advance(other, 2)
    positions.agree(None, 3, taken=8)
    assert (positions.in_step(other, 3), positions.of(other), positions.in_step(None, 3)) == (10, 2, 0)
    positions.agree(one, 4, taken=0)
    positions.advance(one, 2)
    assert (positions.in_step(one, 4), positions.of(one)) == (2, 12)


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
