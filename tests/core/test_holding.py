"""What devices can hold bounds the placements that are chosen, and where shadows go."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.holding import MeasuredMemory, Memory
from deepspeed_bamboo.core.placing.shadowing import choose_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.reconfiguring import next_target
from deepspeed_bamboo.core.timing import Profile


def sites(count: int) -> list[WorkerSite]:
    return [WorkerSite(f"w{i}", f"n{i}") for i in range(count)]


def test_what_a_placement_holds() -> None:
    grid = Grid(1, 4)
    owners = dict(zip(grid, ["a", "a", "b", "c"], strict=True))
    placement = Placement.of(grid, owners=owners, shadows={Coordinate(0, 0): "c", Coordinate(0, 2): "a"})
    memory = Memory((10, 20, 30, 40), (1, 1, 2, 5), {"a": 10 + 20 + 3 + 3 + 30})
    assert memory.held(placement, micro_batches=8) == {"a": 66, "b": 34, "c": 55}
    assert memory.held(placement, micro_batches=1) == {"a": 62, "b": 32, "c": 55}
    assert memory.fits(placement, micro_batches=8)
    assert not Memory(memory.state, memory.activations, {"c": 54}).fits(placement, micro_batches=8)
    assert Memory.from_json(memory.to_json()) == memory


@settings(max_examples=25, deadline=None)
@given(
    state=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    rooms=st.lists(st.integers(4, 20), min_size=2, max_size=3),
    stages_alike=st.booleans(),
)
def test_what_a_worker_cannot_hold_is_never_chosen(state: list[int], rooms: list[int], stages_alike: bool) -> None:
    """Whenever some placement fits, one that fits is found; shadows never take more than what is left."""
    state = [state[0]] * len(state) if stages_alike else state
    grid, workers = Grid(1, len(state)), sites(len(rooms))
    memory = Memory(tuple(state), (1,) * len(state), {f"w{i}": room for i, room in enumerate(rooms)})
    found = balance(grid, workers, profile=Profile.even(len(state)), micro_batches=2, memory=memory)
    possible = any(
        not memory.excess(memory.owned(grid, [f"w{w}" for w in owners], micro_batches=2))
        for owners in itertools.product(range(len(rooms)), repeat=len(state))
    )
    assert found.fits == possible
    if possible:
        assert memory.fits(found.placement, micro_batches=2)


def test_many_stages_go_where_there_is_room() -> None:
    """More placements than are tried: three small devices and a large one."""
    room = {"w0": 40, "w1": 40, "w2": 40, "w3": 200}
    memory = Memory((10,) * 16, (2,) * 16, room)
    found = balance(Grid(1, 16), sites(4), profile=Profile.even(16), micro_batches=4, memory=memory)
    assert found.fits and memory.fits(found.placement, micro_batches=4)
    free = balance(Grid(1, 16), sites(4), profile=Profile.even(16), micro_batches=4)
    assert not memory.fits(free.placement, micro_batches=4)


def test_nothing_moves_when_nothing_would_fit() -> None:
    grid, profile = Grid(1, 4), Profile((1.0,) * 4, (2.0,) * 4, {"w0": 0.25})
    placement = balance(grid, sites(2), profile=Profile.even(4), micro_batches=4).placement
    known = {"members": sites(2), "profile": profile, "micro_batches": 4, "look": True}
    assert next_target(placement, **known) is not None
    full = Memory((10,) * 4, (0,) * 4, {"w0": 10, "w1": 10})
    assert next_target(placement, **known, memory=full) is None


def test_what_workers_measure_is_known_of_all_stages_before_it_counts() -> None:
    grid = Grid(1, 3)
    owners = dict(zip(grid, ("w0", "w1", "w1"), strict=True))
    placement = Placement.of(grid, owners=owners, shadows={Coordinate(0, 0): "w1"})
    first = {"w0": {"stages": [[0, 10, 2]], "usable": 100, "peak": 20}}
    known = MeasuredMemory().after(first, placement, micro_batches=4)
    assert known.of(3, members=("w0", "w1")) is None
    both = {**first, "w1": {"stages": [[1, 13, 3], [2, 8, 1]], "usable": 80, "peak": 40}}
    known = known.after(both, placement, micro_batches=4)
    # w0 holds 10 + 2 * 2 of its peak of 20, w1 13 + 8 + 10 for its shadow and 3 + 1 of 40.
    rooms = {"w0": 94 - 6, "w1": 75 - 5}
    assert known.of(3, members=("w0", "w1")) == Memory((10, 13, 8), (2, 3, 1), rooms)
    # Without the worker that was lost, whose stage is as large as before.
    assert known.of(3, members=("w1",)) == Memory((10, 13, 8), (2, 3, 1), {"w1": 70})


def test_of_a_stage_that_several_pipelines_have_the_most_counts() -> None:
    grid = Grid(2, 1)
    placement = Placement.of(grid, owners=dict(zip(grid, ("w0", "w1"), strict=True)), shadows={})
    seen = {
        "w0": {"stages": [[0, 10, 4]], "usable": 100, "peak": 0},
        "w1": {"stages": [[0, 11, 3]], "usable": 100, "peak": 0},
    }
    known = MeasuredMemory().after(seen, placement, micro_batches=1)
    assert known.of(1, members=("w0", "w1")) == Memory((11,), (4,), {"w0": 94, "w1": 94})


@settings(max_examples=50, deadline=None)
@given(block=st.integers(1, 6), others=st.integers(1, 6))
def test_the_shadows_of_a_block_are_spread_over_the_others(block: int, others: int) -> None:
    """No worker has more than one more of them than any other, its own stages apart: a lost block is shared at once."""
    grid = Grid(1, block + others)
    owners = {c: "w0" if c.stage < block else f"w{c.stage - block + 1}" for c in grid}
    shadows = choose_shadows(grid, owners, Sites.of(sites(others + 1)), held={})
    assert len(shadows) == len(grid) and all(shadows[c] != owners[c] for c in grid)
    holders = [shadows[c] for c in grid if owners[c] == "w0"]
    counts = [holders.count(f"w{number}") for number in range(1, others + 1)]
    assert sum(counts) == block and max(counts) - min(counts) <= 1
