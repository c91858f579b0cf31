"""Placing: the goals for any workers, any current placement; what moves; shadows; losses; errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.loss_cost import loss_cost
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.exhaustive_check import true_best
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.placing.solver import Decision, decide, place
from tests.core.placing_cases import grids, some_bytes, some_current, some_sites


def in_zones(zones: str) -> list[WorkerSite]:
    """One worker a node, one letter a zone."""
    return [WorkerSite(f"w{i}", f"n{i}", zone) for i, zone in enumerate(zones)]


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    grid = draw(st.sampled_from(list(grids(12))))
    workers = draw(some_sites())
    current = draw(st.none() | some_current(grid, workers))
    return decide(grid, workers, current=current, bytes_of=draw(some_bytes(grid)))


@settings(max_examples=60, deadline=None)
@given(decisions())
def test_goals_hold_for_any_workers_and_any_current_placement(decision: Decision) -> None:
    placement, sites = decision.placement, decision.sites
    assert decision.pairs == decision.bound.pairs
    assert decision.bytes_moved >= decision.least_bytes
    load = Counter(worker for _, worker in placement.owners)
    assert set(load) <= set(sites.workers)
    assert max(load.values()) <= -(-len(placement.grid) // len(sites))
    assert len(placement.shadows) == (len(placement.grid) if len(sites) > 1 else 0)
    if len(sites.nodes) > 1:
        for node in range(len(sites.nodes)):
            assert not loss_cost(placement, sites.of_node(node)).fatal
    if len(sites.zones) > 1:
        for zone in range(len(sites.zones)):
            assert not loss_cost(placement, sites.of_zone(zone)).fatal


@settings(max_examples=40, deadline=None)
@given(decisions())
def test_what_was_just_placed_stays(decision: Decision) -> None:
    sites = decision.sites
    workers = [
        WorkerSite(worker, sites.nodes[node], "" if sites.zones[zone].startswith("unknown") else sites.zones[zone])
        for worker, node, zone in zip(sites.workers, sites.node, sites.zone, strict=True)
    ]
    again = decide(decision.placement.grid, workers, current=decision.placement)
    assert again.placement.owners == decision.placement.owners
    assert (again.bytes_moved, again.proven) == (0, True)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bytes_agree_with_trying_everything(data: st.DataObject) -> None:
    grid = data.draw(st.sampled_from(list(grids(5))))
    workers = data.draw(some_sites(most=4))
    current, sizes = data.draw(some_current(grid, workers)), data.draw(some_bytes(grid))
    decision = decide(grid, workers, current=current, bytes_of=sizes)
    best = true_best(grid, Sites.of(workers), most=decision.most, current=current, bytes_of=sizes.__getitem__)
    assert decision.proven
    assert (decision.pairs.node, decision.pairs.zone, decision.bytes_moved) == best


def test_one_lost_worker_is_replaced_by_the_standby_and_nothing_else_moves() -> None:
    workers, grid = in_zones("abcabc"), Grid(1, 5)
    before = place(grid, workers)
    lost = before.owner(Coordinate(0, 2))
    decision = decide(grid, [site for site in workers if site.worker != lost], current=before)
    changed = {c for c, worker in decision.placement.owners if worker != before.owner(c)}
    assert decision.pairs == decision.bound.pairs
    assert Coordinate(0, 2) in changed
    assert decision.bytes_moved == 1 and decision.proven


def test_a_worker_that_joins_is_given_what_is_beyond_the_fair_share() -> None:
    workers, grid = in_zones("abcd"), Grid(1, 4)
    three = place(grid, workers[:3])
    assert max(Counter(worker for _, worker in three.owners).values()) == 2
    four = decide(grid, workers, current=three)
    assert sorted(worker for _, worker in four.placement.owners) == ["w0", "w1", "w2", "w3"]
    assert four.bytes_moved == 1


@pytest.mark.parametrize(("zones", "stages"), [("abcde", 8), ("aabbc", 8), ("abc", 7), ("aabb", 6), ("aaabbbcc", 12)])
def test_loads_differ_by_one_at_most(zones: str, stages: int) -> None:
    placement = place(Grid(1, stages), in_zones(zones))
    load = [len(placement.hosted_by(f"w{i}")) for i in range(len(zones))]
    assert max(load) - min(load) <= 1


def test_the_shadow_is_with_the_predecessor_where_zones_allow() -> None:
    grid = Grid(2, 4)
    placement = place(grid, in_zones("aabbccdd"))
    assert all(placement.shadow(c) == placement.owner(grid.predecessor(c)) for c in grid)


def test_with_one_stage_the_shadow_is_in_the_next_pipeline() -> None:
    grid = Grid(4, 1)
    placement = place(grid, in_zones("aabb"))
    assert all(placement.shadow(c) == placement.owner(Coordinate((c.pipeline + 1) % 4, 0)) for c in grid)


def test_uneven_zones_leave_pairs_but_no_shadow_in_the_zone_of_its_owner() -> None:
    workers = in_zones("aaaaaab")
    decision = decide(Grid(1, 7), workers)
    assert decision.pairs.zone == 5
    zone = {site.worker: site.zone for site in workers}
    assert all(zone[w] != zone[decision.placement.shadow(c) or ""] for c, w in decision.placement.owners)


def test_workers_without_known_zones_are_kept_apart_by_node() -> None:
    workers = [WorkerSite(f"w{i}", f"n{i // 2}") for i in range(4)]
    decision = decide(Grid(1, 4), workers)
    assert (decision.pairs.node, decision.pairs.zone) == (0, 0)
    assert len(decision.sites.zones) == 2


def test_one_worker_hosts_all_without_shadows() -> None:
    placement = place(Grid(2, 3), in_zones("a"))
    assert placement.workers == ("w0",) and placement.shadows == ()


def test_unprotected_has_no_shadows_and_alike_is_kept() -> None:
    grid, workers = Grid(2, 2), in_zones("abab")
    first = place(grid, workers, protected=False, alike=True)
    assert first.shadows == () and first.alike
    assert place(grid, workers, current=first).alike
    assert not place(Grid(1, 4), workers, alike=True).alike


def test_most_allows_more_than_the_fair_share_for_fewer_pairs() -> None:
    workers = in_zones("aaab")
    assert decide(Grid(1, 4), workers).pairs.zone == 2
    decision = decide(Grid(1, 4), workers, most=2)
    assert decision.pairs.zone == 0
    assert "2 at most" in decision.reason


@pytest.mark.parametrize(
    ("workers", "named"),
    [
        ([], "at least one"),
        ([WorkerSite("w0", "n0", "a"), WorkerSite("w0", "n1", "a")], "'w0' is listed twice"),
        ([WorkerSite("w0", "n0", "a"), WorkerSite("w1", "n0", "b")], "node 'n0' is in zone 'a' and in zone 'b'"),
        ([WorkerSite("w0", "", "a")], "its own node"),
    ],
)
def test_workers_that_contradict_each_other_are_refused(workers: list[WorkerSite], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        place(Grid(1, 2), workers)


def test_other_unusable_values_are_refused() -> None:
    grid, workers = Grid(1, 2), in_zones("ab")
    current = place(grid, workers)
    with pytest.raises(ValueError, match="never changes"):
        place(Grid(1, 3), workers, current=current)
    with pytest.raises(ValueError, match="allow 1 or more"):
        place(grid, workers, most=0)
    with pytest.raises(ValueError, match=r"bytes of 0\.0 are -1"):
        place(grid, workers, current=current, bytes_of=lambda _: -1)


def test_a_lost_pair_is_copied_where_pipelines_are_alike_and_fatal_elsewhere() -> None:
    grid = Grid(2, 2)
    owners = dict(zip(grid, ("w0", "w1", "w2", "w3"), strict=True))
    shadows = {c: owners[grid.predecessor(c)] for c in grid}
    lost = ["w0", "w1"]
    alone = loss_cost(Placement.of(grid, owners=owners, shadows=shadows), lost)
    assert alone.fatal == (Coordinate(0, 0), Coordinate(0, 1)) and not alone.taken_over
    alike = loss_cost(Placement.of(grid, owners=owners, shadows=shadows, alike=True), lost)
    assert alike.copied == alone.fatal and not alike.fatal
    one = loss_cost(Placement.of(grid, owners=owners, shadows=shadows), ["w0"])
    assert (one.taken_over, one.unprotected) == ((Coordinate(0, 0),), (Coordinate(0, 1),))


def test_one_worker_that_knows_its_zone_knows_that_of_its_node() -> None:
    sites = Sites.of([WorkerSite("w0", "n0"), WorkerSite("w1", "n0", "a"), WorkerSite("w2", "n1", "a")])
    assert (sites.zones, sites.zone) == (("a",), (0, 0, 0))
