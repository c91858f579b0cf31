"""How many micro-batches steps had, where a script changes that."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.micro_batch_counts import MicroBatchCounts

steps = st.lists(st.integers(1, 5), min_size=1, max_size=20)


@given(steps, st.integers(0, 3), st.data())
def test_totals_are_the_sums_of_what_each_step_had(counts: list[int], first: int, data: st.DataObject) -> None:
    known = MicroBatchCounts()
    for step, count in enumerate(counts, first):
        known = known.with_step(step, count)
    since = data.draw(st.integers(first, first + len(counts)))
    until = data.draw(st.integers(since, first + len(counts)))
    assert known.total(since, until=until) == sum(counts[since - first : until - first])
    if first and until > first:
        assert known.total(first - 1, until=until) is None
    assert MicroBatchCounts.from_json(json.loads(json.dumps(known.to_json()))) == known


@given(steps, steps, st.data())
def test_steps_that_are_done_again_count_as_they_are_then(
    counts: list[int], again: list[int], data: st.DataObject
) -> None:
    back = data.draw(st.integers(0, len(counts)))
    known = straight = MicroBatchCounts()
    for step, count in enumerate(counts):
        known = known.with_step(step, count)
    for step, count in enumerate(again, back):
        known = known.with_step(step, count)
    for step, count in enumerate([*counts[:back], *again]):
        straight = straight.with_step(step, count)
    assert known == straight
