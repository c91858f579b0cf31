"""What is left of an iteration after a loss: bounds that hold for any grid, placement and moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.interrupted import remaining_seconds
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.timing import Profile, iteration_seconds, timed_passes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, Placement, Profile, int]:
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    workers = [f"w{number}" for number in range(draw(st.integers(3, len(grid) + 1)))]
    before = Placement.initial(grid, workers)
    after, _ = before.without([draw(st.sampled_from(before.workers))])
    assert after is not None
    forward = tuple(draw(st.floats(0.5, 2.0)) for _ in range(grid.stages))
    profile = Profile(forward, tuple(2 * one for one in forward), handover=draw(st.floats(0.0, 0.2)))
    return before, after, profile, draw(st.integers(1, 6))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_loss_at_the_start_leaves_an_iteration_of_the_new_placement(
    case: tuple[Placement, Placement, Profile, int],
) -> None:
    before, after, profile, micro_batches = case
    left = remaining_seconds(before, after, profile, micro_batches=micro_batches, at_seconds=0.0)
    assert left == pytest.approx(iteration_seconds(after, profile, micro_batches=micro_batches))


@given(cases(), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_what_is_left_is_the_lost_part_at_least_and_no_more_than_all(
    case: tuple[Placement, Placement, Profile, int], share: float
) -> None:
    before, after, profile, micro_batches = case
    at = share * iteration_seconds(before, profile, micro_batches=micro_batches)
    lost = [c for c, worker in before.owners if dict(after.owners)[c] != worker]
    left = remaining_seconds(before, after, profile, micro_batches=micro_batches, at_seconds=at)
    eager = remaining_seconds(before, after, profile, micro_batches=micro_batches, at_seconds=at, eager=True)
    work = max(profile.work(c.stage) for c in lost) * micro_batches
    assert work * (1 - 1e-9) <= left
    # One pass after the other, and two messages between any two stages, one there and one back.
    everything = sum(profile.work(c.stage) + 2 * profile.handover for c in before.grid) * micro_batches
    assert max(eager, left) <= everything * (1 + 1e-9)
    # After the last pass nothing but the lost stages' work is left, whoever has them.
    ends = timed_passes(before, profile, micro_batches=micro_batches)
    last = max(end for _, end in ends)
    after_all = remaining_seconds(before, after, profile, micro_batches=micro_batches, at_seconds=last)
    messages = 2 * len(lost) * micro_batches * profile.handover  # between lost stages that went to different workers
    assert after_all <= sum(profile.work(c.stage) for c in lost) * micro_batches * (1 + 1e-9) + messages
