"""Hosting: everything is hosted, loads are even, neighbours are apart, and core's placement agrees."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.hosting import Hosting
from deepspeed_bamboo.sim.steptimes import Grid

grids = st.builds(Grid, st.integers(1, 5), st.integers(1, 8))


def hosting_of(grid: Grid, workers: int, *, zones: int = 1) -> Hosting:
    hosting = Hosting(grid)
    for index in range(workers):
        hosting.join(f"w{index}", f"z{index % zones}" if zones > 1 else "")
    hosting.place_all()
    return hosting


@given(grid=grids, workers=st.integers(1, 40))
@settings(deadline=None)
def test_loads_are_even(grid: Grid, workers: int) -> None:
    hosting = hosting_of(grid, workers)
    assert all(node in hosting for node in hosting.host if node is not None)
    assert None not in hosting.host
    assert hosting.most_hosted == hosting.fair_share


@given(grid=st.builds(Grid, st.integers(1, 4), st.integers(4, 8)), spare=st.integers(0, 6))
@settings(deadline=None)
def test_with_a_worker_each_neighbours_are_apart(grid: Grid, spare: int) -> None:
    hosting = hosting_of(grid, grid.size + spare)
    placement = hosting.placement()
    assert len(placement.shadows) == grid.size
    assert all(placement.shadow(one) != worker for one, worker in placement.owners)


def test_neighbours_are_in_different_zones() -> None:
    hosting = hosting_of(Grid(2, 6), 12, zones=3)
    zone = {f"w{index}": f"z{index % 3}" for index in range(12)}
    assert all(zone[str(hosting.host[one])] != zone[str(hosting.host[hosting.predecessor(one)])] for one in range(12))


@given(grid=grids, seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_any_coming_and_going_keeps_loads_even(grid: Grid, seed: int) -> None:
    generator = random.Random(seed)
    hosting = hosting_of(grid, 6)
    live = [f"w{index}" for index in range(6)]
    for index in range(30):
        draw = generator.random()
        if draw < 0.45 or len(live) < 3:
            live.append(f"x{index}")
            hosting.join(live[-1], "")
        elif draw < 0.8:
            lost = hosting.leave(live.pop(generator.randrange(len(live))))
            for coordinate in lost:
                hosting.put(coordinate, generator.choice(live))
        else:
            hosting.drain(live[0])
            hosting.rebalance()
            assert hosting.hosted(live[0]) == ()
            assert hosting.leave(live.pop(0)) == ()
        moved = hosting.rebalance(range(grid.size))
        assert len(set(moved)) == len(moved)
        assert hosting.most_hosted == hosting.fair_share
        assert set(hosting.host) <= set(live)


def test_balance_needs_few_moves() -> None:
    hosting = hosting_of(Grid(2, 12), 12)
    hosting.join("new", "")
    # 24 coordinates on 13 workers: two on the most loaded, as before.
    assert hosting.rebalance() == []
    lost = hosting.leave("w3")
    for coordinate in lost:
        hosting.put(coordinate, hosting.host[hosting.predecessor(coordinate)])
    assert set(hosting.rebalance(lost)) == set(lost)


@given(grid=st.builds(Grid, st.integers(1, 3), st.integers(3, 6)), seed=st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_a_takeover_is_what_core_says(grid: Grid, seed: int) -> None:
    generator = random.Random(seed)
    hosting = hosting_of(grid, grid.size)
    before = hosting.placement()
    victim = f"w{generator.randrange(grid.size)}"
    after, fatal = before.without([victim])
    assert after is not None
    assert fatal == ()
    for coordinate in hosting.leave(victim):
        hosting.put(coordinate, hosting.host[hosting.predecessor(coordinate)])
    assert hosting.placement().owners == after.owners


@pytest.mark.parametrize(("grid", "coordinate", "shadow"), [(Grid(2, 3), 3, 5), (Grid(3, 1), 2, 0), (Grid(1, 1), 0, 0)])
def test_the_shadow_rule(grid: Grid, coordinate: int, shadow: int) -> None:
    hosting = Hosting(grid)
    assert hosting.predecessor(coordinate) == shadow
    assert hosting.successor(shadow) == coordinate
