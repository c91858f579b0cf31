"""Ranks as scripts see them: always the grid's, each stood for by one worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.script_ranks import own_rank, parties, ranks_of, reporter


@st.composite
def after_losses(draw: st.DrawFn) -> tuple[Placement, list[str]]:
    """A placement that has lost workers one after the other, and who is left; maybe some stand by."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    members = [f"w{n}" for n in range(len(grid) + draw(st.integers(0, 2)))]
    placement = Placement.initial(grid, members)
    while len(members) > 1 and draw(st.booleans()):
        lost = draw(st.sampled_from(members))
        left, fatal = placement.without([lost])
        if fatal or left is None:
            break
        members.remove(lost)
        placement = left.protected(members)
    return placement, members


@given(after_losses())
def test_every_rank_has_one_worker_and_every_worker_a_rank_of_its_own(case: tuple[Placement, list[str]]) -> None:
    placement, members = case
    own = {worker: own_rank(placement, worker, members=members) for worker in members}
    assert len(set(own.values())) == len(members)
    assert sorted(rank for worker in members for rank in ranks_of(placement, worker)) == list(
        range(len(placement.grid))
    )
    assert [worker for worker, rank in own.items() if rank == 0] == [reporter(placement)]


@given(after_losses(), st.data())
def test_a_group_is_served_by_those_alone_who_hold_it(case: tuple[Placement, list[str]], data: st.DataObject) -> None:
    placement, members = case
    homes = {f"w{n}": n for n in range(len(placement.grid) + 2)}
    ranks = data.draw(st.lists(st.integers(0, len(placement.grid) - 1), min_size=1, unique=True).map(sorted))
    found = parties(placement, ranks, homes=homes)
    assert set(found.values()) == {
        worker for worker in members if homes[worker] in ranks and ranks_of(placement, worker)
    }
    assert all(rank in ranks_of(placement, worker) for rank, worker in found.items())


def test_the_world_stays_whole_after_a_loss() -> None:
    placement, _ = Placement.initial(Grid(1, 4), ["a", "b", "c", "d"]).without(["a"])
    assert placement is not None
    assert ranks_of(placement, "d") == (0, 3) and own_rank(placement, "d", members=["b", "c", "d"]) == 0
    homes = {"b": 1, "c": 2, "d": 3}
    assert parties(placement, [0, 1], homes=homes) == {1: "b"}, "d has no such group"
    assert parties(placement, [0, 3], homes=homes) == {0: "d", 3: "d"}
