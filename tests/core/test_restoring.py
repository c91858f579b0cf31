"""What survivors go back to: the newest state that is there as a whole, and who gives whom its part of it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.memory_rounds import MemoryNote, MemoryProgress
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.restoring import Kept, Site, handovers, keepers, newest_state, rescued, stored_steps

GRIDS = st.builds(Grid, st.integers(1, 3), st.integers(1, 5))
WORKERS = tuple(f"w{index}" for index in range(8))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    grid, count = draw(GRIDS), draw(st.integers(1, 8))
    return Placement.initial(grid, WORKERS[:count], alike=draw(st.booleans()))


@st.composite
def inventories(draw: st.DrawFn) -> tuple[Grid, dict[str, Kept]]:
    grid = draw(GRIDS)
    parts = st.dictionaries(st.integers(0, 6), st.lists(st.sampled_from(tuple(grid)), unique=True).map(tuple))
    stored = st.lists(st.integers(0, 9), unique=True).map(tuple)
    kept = st.builds(Kept, parts, st.integers(0, 4), stored)
    return grid, draw(st.dictionaries(st.sampled_from(WORKERS), kept, min_size=1))


@given(case=inventories(), until=st.integers(0, 6), data=st.data())
def test_the_newest_state_that_is_there_as_a_whole_is_taken(
    case: tuple[Grid, dict[str, Kept]], until: int, data: st.DataObject
) -> None:
    grid, kept = case
    copies = [(w, s, c) for w, own in kept.items() for s, parts in own.parts.items() for c in parts]
    damaged = set(data.draw(st.lists(st.sampled_from(copies), unique=True))) if copies else set()
    there = {
        step
        for step in range(until + 1)
        if all(any((w, step, c) in copies and (w, step, c) not in damaged for w in kept) for c in grid)
        and all(own.redoes_from <= step for own in kept.values())
    }
    found = newest_state(grid, kept, until=until, without=damaged)
    assert (None if found is None else found.step) == max(there, default=None)
    if found is not None:
        assert found.holders.keys() == set(grid)
        for coordinate, holders in found.holders.items():
            assert holders and all((w, found.step, coordinate) in copies for w in holders)
            assert not any((w, found.step, coordinate) in damaged for w in holders)


@given(case=inventories(), until=st.integers(0, 9), data=st.data())
def test_the_store_is_looked_at_for_what_is_newer_than_memory_and_can_be_gone_on_from(
    case: tuple[Grid, dict[str, Kept]], until: int, data: st.DataObject
) -> None:
    grid, kept = case
    unread = data.draw(st.sets(st.integers(0, 9), max_size=2))
    state = newest_state(grid, kept, until=until)
    found = stored_steps(kept, until=until, than=state, without=unread)
    assert list(found) == [
        step
        for step in range(until + 1)
        if any(step in own.stored for own in kept.values())
        and all(own.redoes_from <= step for own in kept.values())
        and step not in unread
        and (state is None or step > state.step)
    ]


STEPS = st.integers(0, 9)
PARTS = st.dictionaries(STEPS, st.lists(st.sampled_from(tuple(Grid(2, 3)))).map(tuple))


@given(own=st.builds(Kept, PARTS, STEPS, st.lists(STEPS).map(tuple)))
def test_what_is_kept_travels_as_text(own: Kept) -> None:
    assert Kept.from_json(json.loads(json.dumps(own.to_json()))) == own


@given(placement=placements(), data=st.data())
def test_the_rest_goes_to_those_who_are_left(placement: Placement, data: st.DataObject) -> None:
    standby = data.draw(st.lists(st.sampled_from(["s0", "s1"]), unique=True))
    everybody = [*placement.workers, *standby]
    members = data.draw(st.lists(st.sampled_from(everybody), min_size=1, unique=True))
    after = rescued(placement, members)
    assert {worker for _, worker in (*after.owners, *after.shadows)} <= set(members)
    for coordinate in placement.grid:
        if placement.owner(coordinate) in members:
            assert after.owner(coordinate) == placement.owner(coordinate)
        elif placement.shadow(coordinate) in members:
            assert after.owner(coordinate) == placement.shadow(coordinate)
        assert (after.shadow(coordinate) is not None) == (len(members) > 1)
    assert after.alike == placement.alike


def test_nobody_is_left_to_own_anything() -> None:
    with pytest.raises(ValueError, match="nobody is left"):
        rescued(Placement.initial(Grid(1, 2), ["a", "b"]), [])


@given(placement=placements(), copies=st.integers(1, 8), zones=st.lists(st.sampled_from("xyz"), min_size=8, max_size=8))
def test_copies_are_with_others_and_far_away(placement: Placement, copies: int, zones: list[str]) -> None:
    sites = {worker: Site(f"n{index // 2}", zones[index]) for index, worker in enumerate(WORKERS)}
    found = keepers(placement, sites, copies=copies)
    load = Counter(worker for kept in found.values() for worker in kept)
    for coordinate, chosen in found.items():
        has = {placement.owner(coordinate), placement.shadow(coordinate)} - {None}
        assert len(set(chosen)) == len(chosen) == min(copies, len(sites) - len(has))
        assert not has & set(chosen)
        used = {sites[worker].zone for worker in has if worker is not None}
        if chosen and {site.zone for site in sites.values()} - used:
            assert sites[chosen[0]].zone not in used
    assert sum(load.values()) == sum(map(len, found.values()))


@given(placement=placements(), data=st.data())
def test_any_loss_that_leaves_one_of_those_who_have_a_copy_leaves_the_state(
    placement: Placement, data: st.DataObject
) -> None:
    sites = {worker: Site(worker) for worker in placement.workers}
    copies = data.draw(st.integers(1, 3))
    chosen = keepers(placement, sites, copies=copies)
    has = {
        c: [w for w in (placement.owner(c), placement.shadow(c), *chosen[c]) if w is not None] for c in placement.grid
    }
    members = data.draw(st.lists(st.sampled_from(placement.workers), min_size=1, unique=True))
    kept = {w: Kept({3: tuple(c for c in placement.grid if w in has[c])}) for w in members}
    state = newest_state(placement.grid, kept, until=5)
    assert (state is not None) == all(set(has[c]) & set(members) for c in placement.grid)
    if len(placement.workers) - len(members) < 2 + copies and len(placement.workers) >= 2 + copies:
        assert state is not None
    if state is None:
        return
    after = rescued(placement, members)
    new = keepers(after, {w: sites[w] for w in members}, copies=copies)
    had = {(c, w) for c, holders in state.holders.items() for w in holders}
    for move in handovers(state, after, new):
        assert (move.coordinate, move.source) in had and (move.coordinate, move.destination) not in had
        had.add((move.coordinate, move.destination))
        had -= {(move.coordinate, move.source)} - {(c, w) for c, ws in state.holders.items() for w in ws}
    for coordinate in after.grid:
        shadow = after.shadow(coordinate)
        for worker in (after.owner(coordinate), *new[coordinate], *([] if shadow is None else [shadow])):
            assert (coordinate, worker) in had


# ---- how far one is ------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.data())
def test_workers_that_come_and_go_agree_and_never_let_the_last_one_go(data: st.DataObject) -> None:
    """Each of them has at any moment all copies of the last complete checkpoint, for as long as it was there."""
    members, progress = list(WORKERS[:3]), MemoryProgress()
    has: dict[str, set[int]] = {worker: set() for worker in members}
    since = dict.fromkeys(members, 0)
    for step in range(1, 12):
        lost = data.draw(st.sampled_from([*members[1:], None, None, None]))
        if lost is not None:
            members.remove(lost)
        notes = {worker: MemoryNote() for worker in members}
        for worker in members:
            if progress.step is not None and worker in progress.waiting and data.draw(st.booleans()):
                has[worker].add(progress.step)
            failed = progress.step if data.draw(st.integers(0, 9)) == 0 else None
            kept = progress.step if progress.step in has[worker] else None
            notes[worker] = MemoryNote(None, kept, failed)
        if progress.step is None:
            notes[members[0]] = MemoryNote(take=step)
        before, progress = progress, progress.after(notes)
        assert MemoryProgress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
        assert len(progress.wanted) <= 2 and list(progress.wanted) == sorted(set(progress.wanted))
        assert progress.complete[-1:] == before.complete[-1:] or progress.complete[-1] == before.step
        for worker in members:
            has[worker] &= {*progress.wanted}
            if progress.complete and since[worker] < progress.complete[-1]:
                assert progress.complete[-1] in has[worker]
        if data.draw(st.booleans()) and len(has) < len(WORKERS):
            joiner = WORKERS[len(has)]
            members.append(joiner)
            has[joiner], since[joiner] = set(), step
