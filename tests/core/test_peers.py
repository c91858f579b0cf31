"""Whom workers talk to: both sides of each pair say so, before a loss and after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.peers import peers_after_a_loss, peers_of, staying_first, tree_neighbours
from deepspeed_bamboo.core.placement import Placement


@given(st.integers(1, 2), st.integers(1, 4), st.integers(0, 2))
def test_whoever_is_lost_the_others_had_known_all_whom_they_then_talk_to(
    pipelines: int, stages: int, standing_by: int
) -> None:
    grid = Grid(pipelines, stages)
    members = tuple(f"w{index}" for index in range(len(grid) + standing_by))
    placement = Placement.initial(grid, members[: len(grid)])
    known = {worker: set(peers_after_a_loss(placement, worker, members=members)) for worker in members}
    assert all(worker in known[other] for worker in members for other in known[worker])
    for lost in members:
        after, _ = placement.without([lost])
        if after is None:
            continue
        left = tuple(member for member in members if member != lost)
        for worker in left:
            for now in (after, after.protected(left)):
                assert set(peers_of(now, worker, members=left)) <= known[worker]


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.integers(1, 4))
def test_whoever_stays_hears_of_an_agreement_from_one_that_stays(count: int, leaves: set[int], fan_out: int) -> None:
    members = tuple(f"w{index}" for index in range(count))
    leaving = {f"w{index}" for index in leaves}
    order = staying_first(members, leaving=leaving)
    assert sorted(order) == sorted(members)
    for member in order:
        above, _ = tree_neighbours(order, member, fan_out=fan_out)
        assert member in leaving or above is None or above not in leaving
