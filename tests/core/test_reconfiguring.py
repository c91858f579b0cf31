"""What a reconfiguration leads to, for any workers that stay, join and leave, and what it has to move."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.placing.solver import place
from deepspeed_bamboo.core.reconfiguring import Target, next_target, transfers
from deepspeed_bamboo.core.timing import Profile
from tests.core.placing_cases import grids, some_sites


def on_nodes(nodes: str) -> list[WorkerSite]:
    return [WorkerSite(f"w{i}", node) for i, node in enumerate(nodes)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, list[WorkerSite], list[WorkerSite], set[str]]:
    """A placement, its members, who wants to join, and nodes to be left."""
    grid = draw(st.sampled_from(list(grids(8))))
    sites = draw(some_sites(most=8))
    count = draw(st.integers(1, len(sites)))
    members, joining = sites[:count], sites[count:]
    nodes = sorted({site.node for site in sites})
    return place(grid, members), members, joining, set(draw(st.lists(st.sampled_from(nodes), max_size=2)))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_target_has_exactly_those_who_stay_and_come(
    case: tuple[Placement, list[WorkerSite], list[WorkerSite], set[str]],
) -> None:
    placement, members, joining, draining = case
    target = next_target(placement, members=members, joining=joining, draining=draining)
    if target is None:
        assert not joining or all(site.node in draining for site in joining)
        return
    staying = [site.worker for site in members if site.worker not in target.leaving]
    assert target.members == (*staying, *target.joining)
    assert set(target.leaving) <= {site.worker for site in members if site.node in draining}
    assert not {site.node for site in joining if site.worker in target.joining} & draining
    assert target.placement.holders <= set(target.members)
    assert Target.from_json(target.to_json()) == target


@settings(max_examples=150, deadline=None)
@given(cases())
def test_after_the_transfers_everybody_holds_what_the_target_gives_it(
    case: tuple[Placement, list[WorkerSite], list[WorkerSite], set[str]],
) -> None:
    placement, members, joining, draining = case
    target = next_target(placement, members=members, joining=joining, draining=draining, rearrange=True)
    if target is None:
        return
    held = {(c, w) for c, w in (*placement.owners, *placement.shadows)}
    for move in transfers(placement, target.placement):
        assert move.source == placement.owner(move.coordinate)
        assert (move.coordinate, move.destination) not in held, "moved to where it was"
        held.add((move.coordinate, move.destination))
    assert held >= {*target.placement.owners, *target.placement.shadows}


def test_nothing_changes_while_nothing_happens() -> None:
    members = on_nodes("abcd")
    assert next_target(place(Grid(1, 4), members), members=members) is None


@pytest.mark.parametrize("other", ["", "b"])
@pytest.mark.parametrize("rearrange", [True, False])
def test_a_slot_that_does_not_know_its_zone_or_contradicts_its_node_ends_no_job(other: str, rearrange: bool) -> None:
    """An unknown zone is that of the node's other workers; of a node in two zones none is known."""
    said = [("n0", "a"), ("n0", other), ("n1", "c"), ("n1", "c")]
    counted = [("n0", "a" if other == "" else ""), ("n0", "a" if other == "" else ""), ("n1", "c"), ("n1", "c")]
    members, same = ([WorkerSite(f"w{n}", *where) for n, where in enumerate(places)] for places in (said, counted))
    launched = Placement.initial(Grid(1, 4), [site.worker for site in members])
    target = next_target(launched, members=members, rearrange=rearrange)
    assert target == next_target(launched, members=same, rearrange=rearrange)
    joiner = WorkerSite("w4", "n0", "a")
    joined = next_target(launched, members=members, joining=[joiner], profile=Profile.even(4), micro_batches=4)
    assert joined is not None and joined.joining == ("w4",)


def test_one_that_stands_by_takes_over_from_one_that_hosts_too_much() -> None:
    placement, _ = place(Grid(1, 4), on_nodes("abcd")).without(["w1"])
    assert placement is not None
    members = [site for site in on_nodes("abcde") if site.worker != "w1"]
    target = next_target(placement, members=members)
    assert target is not None
    assert (target.joining, target.leaving) == ((), ())
    assert sorted(worker for _, worker in target.placement.owners) == ["w0", "w2", "w3", "w4"]


def test_nobody_leaves_when_nobody_would_be_left() -> None:
    members = on_nodes("aa")
    assert next_target(place(Grid(1, 2), members), members=members, draining={"a"}) is None


def test_at_the_start_shadows_leave_their_owners_node_where_no_owner_has_to_move() -> None:
    """Three stages on a node of two and one of one: neighbours stay together somewhere, a lost node is survived."""
    sites = [WorkerSite("w0", "a", "z"), WorkerSite("w1", "a", "z"), WorkerSite("w2", "b", "z")]
    nodes = {site.worker: site.node for site in sites}
    launched = Placement.initial(Grid(1, 3), ["w0", "w1", "w2"])
    assert next_target(launched, members=sites) is None, "later only a loss, a joiner or the time is a reason"
    target = next_target(launched, members=sites, rearrange=True)
    assert target is not None
    placed = target.placement
    assert all(nodes[placed.owner(c)] != nodes[shadow] for c, shadow in placed.shadows)
    assert next_target(placed, members=sites, rearrange=True) is None


@pytest.mark.parametrize(("grid", "zones"), [(Grid(2, 3), "ababba"), (Grid(1, 3), "aab"), (Grid(1, 5), "ababa")])
def test_a_zone_that_would_take_owner_and_shadow_is_a_reason_to_move_shadows(grid: Grid, zones: str) -> None:
    """In a cycle of three, two neighbours are in one of two zones wherever stages are; their shadows need not be."""
    sites = [WorkerSite(f"w{n}", f"n{n}", zone) for n, zone in enumerate(zones)]
    launched = Placement.initial(grid, [site.worker for site in sites])
    assert launched.without([site.worker for site in sites if site.zone == "a"])[0] is None
    target = next_target(launched, members=sites, rearrange=True)
    assert target is not None
    for zone in "ab":
        assert target.placement.without([site.worker for site in sites if site.zone == zone])[0] is not None
    assert next_target(target.placement, members=sites, rearrange=True) is None


def test_after_a_loss_shadows_leave_their_owners_zone_though_no_owner_moves() -> None:
    """They are made again wherever that is quickest; at the next boundary zones count again."""
    sites = [WorkerSite(f"w{n}", f"n{n}", zone) for n, zone in enumerate("ababab")]
    placement, moved = place(Grid(1, 6), sites), 0
    for lost in range(6):
        left = [site for site in sites if site.worker != f"w{lost}"]
        after, _ = placement.without([f"w{lost}"])
        assert after is not None
        repaired = after.protected([site.worker for site in left])
        target = next_target(repaired, members=left, profile=Profile.even(6), micro_batches=4, look=True)
        zones = {site.worker: site.zone for site in left}
        found = repaired if target is None else target.placement
        moved += target is not None and found.owners == repaired.owners
        for zone in "ab":
            assert found.without([worker for worker, its in zones.items() if its == zone])[0] is not None, lost
        again = next_target(found, members=left, profile=Profile.even(6), micro_batches=4, look=True)
        assert again is None
    assert moved


def test_the_reason_of_a_move_for_speed_names_what_moves() -> None:
    placement, _ = place(Grid(1, 8), on_nodes("abcd")).without(["w1"])
    assert placement is not None
    left = [site for site in on_nodes("abcd") if site.worker != "w1"]
    target = next_target(placement, members=left, profile=Profile.even(8), micro_batches=4, look=True)
    assert target is not None
    moves = [
        f"{c} to {target.placement.owner(c)}" for c in Grid(1, 8) if target.placement.owner(c) != placement.owner(c)
    ]
    assert moves and target.reason.startswith(f"moved to share the work better: {', '.join(moves)}; passes of an")


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 7))
def test_looking_again_after_a_loss_settles(
    case: tuple[Placement, list[WorkerSite], list[WorkerSite], set[str]], number: int
) -> None:
    """Whoever is lost: what a look changes is at most once to be changed, and everything keeps a shadow."""
    placement, members, _, _ = case
    lost = members[number % len(members)].worker
    left = [site for site in members if site.worker != lost]
    after, _ = placement.without([lost]) if left else (None, ())
    if after is None:
        return
    repaired = after.protected([site.worker for site in left])
    profile = Profile.even(placement.grid.stages)
    target = next_target(repaired, members=left, profile=profile, micro_batches=4, look=True)
    if target is None:
        return
    assert len(target.placement.shadows) == len(repaired.shadows)
    again = next_target(target.placement, members=left, profile=profile, micro_batches=4, look=True)
    assert again is None or again.placement.owners != target.placement.owners
