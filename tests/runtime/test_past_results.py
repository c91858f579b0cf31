"""What scripts were returned, kept by all workers, published in pieces, and read by one that comes late."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.runtime.job.past_results import PIECE_STEPS, PastResults


class Pieces:
    """In the place of a coordinator."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Any]] = {}

    def publish_past(self, piece: int, value: dict[str, Any]) -> None:
        self.kept[piece] = value

    def past(self, piece: int) -> dict[str, Any] | None:
        return self.kept.get(piece)


@given(
    began=st.integers(0, 2 * PIECE_STEPS),
    more=st.integers(1, 3 * PIECE_STEPS),
    every=st.integers(1, 90),
    joined=st.data(),
)
def test_a_late_worker_reads_what_all_were_returned(began: int, more: int, every: int, joined: st.DataObject) -> None:
    pieces = Pieces()
    reporter, heir, late = PastResults(pieces), PastResults(pieces), PastResults(pieces)
    change = joined.draw(st.integers(began, began + more - 1), label="the heir is the reporter from")
    for step in range(began, began + more):
        if step == change:
            heir.take(reporter.to_json())  # it has just come
        for one in (reporter, heir) if step >= change else (reporter,):
            one.note_evaluation(step, step / 3)
            one.note_evaluation(step, -step)
            one.note_additional(step, {"z": step / 7, "half": -step} if step % 2 else {"z": step / 7})
            one.note_loss(step, 1 / (step + 1))
        if step % every == 0 or step == began + more - 1 or step == change - 1:
            (heir if step >= change else reporter).publish()
    for step in range(began, began + more):
        assert late.loss(step) == 1 / (step + 1)
        assert (late.evaluation(step, 0), late.evaluation(step, 1)) == (step / 3, -step)
        assert late.evaluation(step, 2) is None and late.evaluated(step) == 2
        kept = late.additional(step)
        assert kept["z"] == step / 7 and (kept["half"] == -step if step % 2 else math.isnan(kept.get("half", math.nan)))
    assert late.loss(began + more) is None, "nobody knows it"
    again = PastResults(Pieces())
    again.take(late.pieces())
    assert [again.loss(step) for step in range(began, began + more)] == [
        1 / (s + 1) for s in range(began, began + more)
    ]


def test_what_a_job_had_before_it_was_started_again_is_published_once() -> None:
    """A worker that comes late to the second run asks for the losses of the first, and etcd is another one."""
    first, steps = PastResults(Pieces()), 10 * PIECE_STEPS + 3
    for step in range(steps):
        first.note_evaluation(step, step / 4)
        first.note_loss(step, step / 2)
    pieces = Pieces()
    again, heir, late = PastResults(pieces), PastResults(pieces), PastResults(pieces)
    for one in (again, heir):
        one.take(first.pieces(), published=False)
        one.note_loss(steps, 0.5)
    again.publish()
    assert sorted(pieces.kept) == list(range(11))
    assert [late.loss(step) for step in range(steps + 1)] == [*(step / 2 for step in range(steps)), 0.5]
    assert [late.evaluation(step, 0) for step in range(steps)] == [step / 4 for step in range(steps)]
    put: list[int] = []
    pieces.publish_past = lambda piece, _: put.append(piece)  # type: ignore[method-assign, assignment]
    again.note_loss(steps + 1, 0.25)
    again.publish()
    heir.publish()
    assert put == [10, 10]


def test_a_step_done_again_keeps_its_newest_loss_and_a_failed_publication_is_repeated() -> None:
    pieces, late = Pieces(), PastResults(Pieces())
    one = PastResults(pieces)
    one.note_loss(5, 1.0)
    one.note_loss(5, 2.0)
    publish, failures = pieces.publish_past, [OSError("etcd is away")]

    def fails_once(piece: int, value: dict[str, Any]) -> None:
        if failures:
            raise failures.pop()
        publish(piece, value)

    pieces.publish_past = fails_once  # type: ignore[method-assign]
    try:
        one.publish()
    except OSError:
        one.publish()
    late.take({str(piece): value for piece, value in pieces.kept.items()})
    assert late.loss(5) == 2.0 and late.additional(5) == {}
    pieces.kept[0].pop("additional")  # as an earlier version has published it
    earlier = PastResults(pieces)
    assert earlier.additional(5) == {} and earlier.loss(5) == 2.0


def test_a_loss_that_was_not_a_number_is_known() -> None:
    """A script goes back by it; what nobody knows is something else."""
    pieces = Pieces()
    one, late = PastResults(pieces), PastResults(pieces)
    one.note_loss(2, math.nan)
    one.note_loss(3, -math.nan)
    one.note_loss(4, None)
    one.note_loss(5, 0.5)
    one.publish()
    for known in (one, late):
        losses = [known.loss(call) for call in range(7)]
        assert [loss is None for loss in losses] == [True, True, False, False, True, False, True]
        assert [math.isnan(loss) for loss in losses if loss is not None] == [True, True, False]
