"""What nobody had while scripts were between two calls of the engine."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.core.between_steps import Missing, missing
from deepspeed_bamboo.core.consensus import Conclusion
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.progress import CoordinateProgress

GRID = Grid(1, 4)
BEFORE = Placement.initial(GRID, ["a", "b", "c", "d"])
ONE, TWO = Coordinate(0, 1), Coordinate(0, 2)
RECEIVED = CoordinateProgress(activations_received=1)
SENT_BACK = CoordinateProgress(gradients_received=1)


def concluded(kind: str | None, *, agreed: bool = False, **progress: CoordinateProgress) -> Conclusion:
    counts = {Coordinate(0, int(stage[1:])): its for stage, its in progress.items()}
    return Conclusion(7, kind, {7: ("",)} if agreed else {}, counts, step=6)


@pytest.mark.parametrize("kind", [None, "user collective", "settle", "barrier"])
def test_who_is_not_in_an_activity_that_takes_all_at_once_was_lost_before_it(kind: str | None) -> None:
    assert missing(concluded(kind), before=BEFORE, lost=["b"]) == Missing((ONE,), certain=True)


@pytest.mark.parametrize("kind", ["train", "evaluate", "user collective"])
def test_who_was_in_the_agreement_was_there_as_long_as_anybody(kind: str) -> None:
    assert missing(concluded(kind, agreed=True), before=BEFORE, lost=["b"]).coordinates == ()


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_of_whom_nobody_has_received_anything_nobody_knows(kind: str) -> None:
    assert missing(concluded(kind), before=BEFORE, lost=["b"]) == Missing((ONE,), certain=False)
    ahead_of_it = concluded(kind, s0=CoordinateProgress(loaded=2, forwards=2), s3=RECEIVED)
    assert missing(ahead_of_it, before=BEFORE, lost=["b"]) == Missing((ONE,), certain=False)


@pytest.mark.parametrize("heard", [{"s2": RECEIVED}, {"s0": SENT_BACK}])
def test_who_has_sent_something_was_there_when_the_iteration_began(heard: dict[str, CoordinateProgress]) -> None:
    assert missing(concluded("train", **heard), before=BEFORE, lost=["b"]).coordinates == ()


def test_one_stage_that_was_heard_of_speaks_for_all_of_its_worker() -> None:
    before = Placement.of(GRID, owners={c: "a" if c.stage < 3 else "d" for c in GRID}, shadows={})
    heard = concluded("train", s3=RECEIVED)
    assert missing(heard, before=before, lost=["a"]).coordinates == ()
    assert missing(concluded("train"), before=before, lost=["a"]).coordinates == (Coordinate(0, 0), ONE, TWO)
