"""``redundancy.copies: 2``: every stage has an owner and two shadows, on three workers."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.consensus import Report, conclude
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.loss_cost import fatal_pairs, loss_cost
from deepspeed_bamboo.core.peers import tensor_peers
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.holding import Memory
from deepspeed_bamboo.core.placing.shadowing import choose_second_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.placing.solver import decide
from deepspeed_bamboo.core.planning import plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.reconfiguring import next_target, transfers
from deepspeed_bamboo.core.recovery import progress_by_holders
from deepspeed_bamboo.core.restoring import keepers, rescued
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.core.verify import verify
from tests.core.placing_cases import grids, some_sites

GRIDS = [Grid(1, 3), Grid(1, 4), Grid(2, 2), Grid(2, 3), Grid(3, 1), Grid(1, 6)]


def workers(grid: Grid) -> list[str]:
    return [f"w{rank}" for rank in range(len(grid))]


def initial(grid: Grid, copies: int = 2) -> Placement:
    return Placement.initial(grid, workers(grid), copies=copies)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.pipelines}x{grid.stages}")
def test_any_two_lost_at_once_and_then_as_many_copies_as_there_are_workers(grid: Grid) -> None:
    before = initial(grid)
    assert (before.owners, before.shadows) == (initial(grid, 1).owners, initial(grid, 1).shadows)
    assert all(len(set(copies)) == 3 for copies in before.all_copies().values())
    for lost in combinations(workers(grid), 2):
        after, fatal = before.without(lost)
        assert after is not None and not fatal and not set(lost) & after.holders
        for coordinate, copies in after.all_copies().items():
            assert copies == tuple(w for w in before.copies_of(coordinate) if w not in lost)
        left = [worker for worker in workers(grid) if worker not in lost]
        whole = after.protected(left)
        assert whole.owners == after.owners and whole.protected(left) == whole
        assert all(len(set(copies)) == min(3, len(left)) for copies in whole.all_copies().values())
        assert {c: [w for w in its if w not in after.copies_of(c)] for c, its in whole.all_copies().items()} == {
            c: [w for other, w in whole.shadows_beyond(after) if other == c] for c in grid
        }
        assert after.with_shadows(whole.shadows_beyond(after)) == whole


def test_one_lost_after_another_down_to_the_last() -> None:
    grid = Grid(1, 4)
    placement, left = initial(grid), workers(grid)
    for count in (3, 2, 1):
        lost = left.pop(1 if len(left) > 1 else 0)
        after, _ = placement.without([lost])
        assert after is not None
        placement = after.protected(left)
        assert {len(copies) for copies in placement.all_copies().values()} == {min(3, count)}
    assert placement.shadows == placement.second_shadows == () and placement.copies == 2


def test_text_and_what_can_not_be() -> None:
    placement = initial(Grid(1, 4))
    assert Placement.from_json(placement.to_json()) == placement
    assert initial(Grid(1, 4), 1).to_json().keys() == {"pipelines", "stages", "owners", "shadows"}
    here, owners, shadows = Coordinate(0, 0), dict(placement.owners), dict(placement.shadows)
    for odd in ({here: owners[here]}, {here: shadows[here]}):
        with pytest.raises(ValueError, match=r"second shadows of 0\.0 on a worker that has the stage"):
            placement.placed(shadows=shadows, second_shadows=odd)
    with pytest.raises(ValueError, match="there is no first one"):
        placement.placed(shadows={}, second_shadows=dict(placement.second_shadows))
    with pytest.raises(ValueError, match="3 copies; give 1 or 2"):
        Placement.of(placement.grid, owners=owners, shadows=shadows, copies=3)
    with pytest.raises(ValueError, match="third shadow"):
        placement.with_shadows([(here, "another")])


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(list(grids(10))), some_sites(), st.booleans())
def test_no_two_nodes_or_zones_take_all_copies_where_there_are_three(
    data: st.DataObject, grid: Grid, sites: list[WorkerSite], by_time: bool
) -> None:
    if by_time:
        profile = Profile.even(grid.stages)
        found = balance(grid, sites, profile=profile, micro_batches=2, most_passes=200, copies=2)
        placement, numbered = found.placement, found.sites
    else:
        decision = decide(grid, sites, copies=2)
        placement, numbered = decision.placement, decision.sites
        assert placement.shadows == decide(grid, sites).placement.shadows
    assert {len(set(its)) for its in placement.all_copies().values()} == {min(3, len(sites))}
    for names, of in ((numbered.nodes, numbered.of_node), (numbered.zones, numbered.of_zone)):
        together = 2 if len(names) > 2 else len(names) - 1
        for lost in combinations(range(len(names)), together):
            assert not loss_cost(placement, [w for number in lost for w in of(number)]).fatal
    # A change of who is there keeps two shadows, and what moves goes to who has none of it.
    if len(sites) > 1:
        gone = data.draw(st.sampled_from(sites))
        target = next_target(placement, members=sites, draining=[gone.node])
        if target is not None and target.leaving:
            assert target.placement.copies == 2
            moves = transfers(placement, target.placement)
            assert len({(move.coordinate, move.destination) for move in moves}) == len(moves)
            for coordinate, copies in target.placement.all_copies().items():
                got = {move.destination for move in moves if move.coordinate == coordinate}
                assert got == set(copies) - set(placement.copies_of(coordinate))


def farthest_lightest(
    placement: Placement, sites: Sites, held: dict[Coordinate, tuple[str, ...]], room: dict[str, int]
) -> dict[Coordinate, str]:
    """The rule of ``choose_second_shadows``, by looking at every worker for every coordinate."""
    owners, shadows = dict(placement.owners), dict(placement.shadows)
    where = {w: (zone, node) for w, zone, node in zip(sites.workers, sites.zone, sites.node, strict=True)}
    load = Counter([*owners.values(), *shadows.values()])
    free = {w: left - list(shadows.values()).count(w) for w, left in room.items()}
    chosen = {}

    def distance(one: str, other: str) -> int:
        (zone, node), (other_zone, other_node) = where[one], where[other]
        return 3 if zone != other_zone else 2 if node != other_node else 1

    for c in placement.grid:
        behind = owners[placement.grid.predecessor(placement.grid.predecessor(c))]
        able = [w for w in sites.workers if w not in (owners[c], shadows.get(c)) and free.get(w, 1) >= 1]
        if c not in shadows or not able:
            continue
        far = {w: sorted((distance(w, owners[c]), distance(w, shadows[c]))) for w in able}
        chosen[c] = max(able, key=lambda w: (far[w], w in held.get(c, ()), w == behind, -load[w]))
        load[chosen[c]] += 1
        free[chosen[c]] = free.get(chosen[c], 1_000) - 1
    return chosen


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(list(grids(10))), some_sites())
def test_who_gets_a_second_shadow_is_the_same_as_when_every_worker_is_looked_at(
    data: st.DataObject, grid: Grid, given_sites: list[WorkerSite]
) -> None:
    placement, sites = decide(grid, given_sites).placement, Sites.of(given_sites)
    names = st.sampled_from(sites.workers)
    held = {c: tuple(data.draw(st.lists(names, max_size=3))) for c in grid}
    room = data.draw(st.dictionaries(names, st.integers(0, 4)))
    found = choose_second_shadows(
        grid,
        dict(placement.owners),
        dict(placement.shadows),
        sites,
        held=held,
        room=room,
        bytes_of=lambda _: 1,
    )
    assert found == farthest_lightest(placement, sites, held, room)


def test_two_shadows_for_a_thousand_workers_take_less_than_two_seconds() -> None:
    grid = Grid(50, 40)
    sites = [WorkerSite(f"w{i}", f"n{i // 4}", f"z{i // 4 % 20}") for i in range(1000)]
    started = process_time()
    decision = decide(grid, sites, copies=2)
    assert process_time() - started < 2.0
    assert len(decision.placement.second_shadows) == len(grid)


def test_room_limits_second_shadows_first() -> None:
    grid, sites = Grid(1, 4), [WorkerSite(f"w{i}", f"n{i}") for i in range(4)]
    counts = []
    for room in (250, 150):
        memory = Memory((100,) * 4, (1,) * 4, {site.worker: 104 + room for site in sites})
        found = balance(grid, sites, profile=Profile.even(4), micro_batches=4, memory=memory, copies=2)
        assert found.fits and memory.fits(found.placement, micro_batches=4)
        counts.append((len(found.placement.shadows), len(found.placement.second_shadows)))
    assert counts == [(4, 4), (4, 0)]


def test_a_loss_costs() -> None:
    placement = initial(Grid(1, 4))
    two = loss_cost(placement, ["w1", "w2"])
    assert (two.taken_over, two.fatal) == ((Coordinate(0, 1), Coordinate(0, 2)), ())
    three = loss_cost(placement, ["w1", "w2", "w0"])
    assert three.fatal == (Coordinate(0, 2),)
    # Stage 1 lives on at w1, and so does its second shadow, at w3.
    one = loss_cost(placement, ["w0"])
    assert one.unprotected == () and one.taken_over == (Coordinate(0, 0),)


def test_holders_of_second_shadows_are_connected_and_keep_no_more() -> None:
    placement = Placement.of(
        Grid(1, 2),
        owners={Coordinate(0, 0): "a", Coordinate(0, 1): "b"},
        shadows={Coordinate(0, 0): "b", Coordinate(0, 1): "a"},
        second_shadows={Coordinate(0, 0): "c"},
        copies=2,
    )
    assert tensor_peers(placement, "c") == ("a",) and placement.holders == {"a", "b", "c"}
    assert placement.shadowed_by("c") == (Coordinate(0, 0),) and placement.next_in_line("c") == ()
    kept = keepers(placement, {}, copies=1)
    assert kept == {c: [] for c in placement.grid}
    plan = plan_iteration(placement, micro_batches=2, mode="eager")
    verify(plan)
    assert all(instruction.coordinate is None for instruction in plan.program("c"))


def test_more_than_two_lost_leaves_what_is_there_with_who_has_it() -> None:
    placement = initial(Grid(1, 4))
    found = rescued(placement, ["w3"])
    assert {owner for _, owner in found.owners} == {"w3"}
    found = rescued(placement, ["w0", "w3"])
    assert found.copies == 2 and {len(copies) for copies in found.all_copies().values()} == {2}


def test_who_entered_an_epoch_earlier_than_others_is_believed() -> None:
    """The worker that took stage 1 over has done a forward of it; others have not entered that epoch."""
    before = initial(Grid(1, 4))
    first, _ = before.without(["w1"])
    assert first is not None
    after, _ = first.without(["w2"])
    assert after is not None and after.owner(Coordinate(0, 1)) == "w0" and after.owner(Coordinate(0, 2)) == "w0"
    one, two = CoordinateProgress(0, 1, 1, 0, 0), CoordinateProgress(2, 2, 2, 0, 0)
    at_w0 = {Coordinate(0, 0): CoordinateProgress(2, 0, 2, 0, 0), Coordinate(0, 1): one}
    reports = {
        "w0": Report(activity=5, kind="train", progress=at_w0),
        "w3": Report(activity=5, kind="train", progress={Coordinate(0, 3): two}),
    }
    concluded = conclude(reports)
    progress, redundant = progress_by_holders(after, owned=concluded.owned, stored=concluded.stored)
    assert progress == {**at_w0, Coordinate(0, 2): CoordinateProgress(), Coordinate(0, 3): two} and redundant == {}
    # Where it has not entered it, it reports the same as a shadow.
    stored = {Coordinate(0, 1): CoordinateProgress(forwards=1)}
    outside = Report(activity=5, kind="train", progress={Coordinate(0, 0): at_w0[Coordinate(0, 0)]}, redundant=stored)
    concluded = conclude({**reports, "w0": outside})
    assert progress_by_holders(after, owned=concluded.owned, stored=concluded.stored) == (progress, {})


def test_the_job_s_first_change_puts_copies_on_three_nodes() -> None:
    """Ranks know nothing of nodes; two of these are on one."""
    sites = [WorkerSite(f"w{i}", f"n{max(0, i - 1)}") for i in range(4)]
    before = initial(Grid(1, 4))
    nodes = {site.worker: site.node for site in sites}
    assert fatal_pairs(before, nodes)
    target = next_target(before, members=sites, rearrange=True)
    assert target is not None and not fatal_pairs(target.placement, nodes)
    again = next_target(target.placement, members=sites, rearrange=True)
    assert again is None or again.placement.owners == target.placement.owners


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_fatal_pairs_are_those_of_losses(copies: int, alike: bool) -> None:
    placement = Placement.initial(Grid(2, 3), workers(Grid(2, 3)), alike=alike, copies=copies)
    groups = {worker: worker for worker in workers(Grid(2, 3))}
    fatal = {frozenset(pair) for pair in combinations(groups, 2) if loss_cost(placement, pair).fatal}
    assert fatal_pairs(placement, groups) == fatal and bool(fatal) == (copies == 1 and not alike)
