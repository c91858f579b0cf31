"""The fewest neighbouring pairs: formula, placement and exhaustive search agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placing.exhaustive_check import all_owners, true_fewest_pairs
from deepspeed_bamboo.core.placing.lower_bound import count_pairs, fewest_pairs
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.placing.solver import decide
from tests.core.placing_cases import Layout, grids, layouts, sites_of


def agree(layout: Layout, grid: Grid, most: int) -> None:
    workers = sites_of(layout)
    decision = decide(grid, workers, most=most)
    sites = Sites.of(workers)
    true = true_fewest_pairs(grid, sites, most=most)
    assert decision.bound.pairs == true, (layout, grid, most)
    assert count_pairs(grid, decision.placement.owners, sites) == true, (layout, grid, most)


@pytest.mark.parametrize("workers", range(1, 5))
def test_small_cases_agree_with_exhaustive_search(workers: int) -> None:
    for layout in layouts(workers):
        for grid in grids(6):
            fair = -(-len(grid) // workers)
            for most in (fair, fair + 1, len(grid)):
                agree(layout, grid, most)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", range(1, 9))
def test_all_cases_up_to_8_workers_agree_with_exhaustive_search(workers: int) -> None:
    for layout in layouts(workers):
        for grid in grids(8):
            agree(layout, grid, -(-len(grid) // workers))


def test_every_layout_is_there() -> None:
    # The numbers of multisets of partitions (OEIS A001970).
    assert [len(layouts(workers)) for workers in range(1, 9)] == [1, 3, 6, 14, 27, 58, 111, 223]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4).flatmap(lambda w: st.sampled_from(layouts(w))), st.sampled_from(list(grids(5))))
def test_the_exhaustive_search_agrees_with_one_that_merges_nothing(layout: Layout, grid: Grid) -> None:
    sites = Sites.of(sites_of(layout))
    most = -(-len(grid) // len(sites))
    found = (count_pairs(grid, owners.items(), sites) for owners in all_owners(grid, sites, most=most))
    least = min(found, key=lambda pairs: (pairs.node, pairs.zone))
    assert least == true_fewest_pairs(grid, sites, most=most)


@pytest.mark.parametrize(
    ("zones", "grid", "node", "zone"),
    [
        ("abcd", Grid(1, 4), 0, 0),
        ("aabb", Grid(1, 4), 0, 0),
        ("aaab", Grid(1, 4), 0, 2),
        ("aaaa", Grid(1, 4), 0, 4),
        ("aab", Grid(1, 3), 0, 1),
        ("aabbcc", Grid(2, 3), 0, 0),
        ("aaabbb", Grid(2, 3), 0, 2),
        ("ab", Grid(1, 3), 1, 1),
        ("a", Grid(1, 1), 0, 0),
        ("a", Grid(2, 1), 2, 2),
        ("aaab", Grid(2, 2), 0, 2),
    ],
)
def test_known_minima(zones: str, grid: Grid, node: int, zone: int) -> None:
    sites = Sites.of(WorkerSite(f"w{i}", f"n{i}", name) for i, name in enumerate(zones))
    bound = fewest_pairs(grid, sites, most=-(-len(grid) // len(zones)))
    assert (bound.pairs.node, bound.pairs.zone) == (node, zone)
    assert f"neighbours on one node: {f'{node} of ' if node else 'none'}" in bound.reason
    assert f"neighbours in one zone: {f'{zone} of ' if zone else 'none'}" in bound.reason


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1))
def test_larger_grids_reach_the_bound(pipelines: int, stages: int, nodes: list[tuple[int, int]]) -> None:
    workers = [
        WorkerSite(f"w{n}.{i}", f"n{n}", f"z{zone}") for n, (zone, members) in enumerate(nodes) for i in range(members)
    ]
    decision = decide(Grid(pipelines, stages), workers)
    assert decision.pairs == decision.bound.pairs
