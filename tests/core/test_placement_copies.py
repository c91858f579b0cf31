"""A stage lost together with its shadow, when all pipelines hold the same state of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement

GRIDS = [Grid(2, 1), Grid(2, 2), Grid(3, 2), Grid(2, 3), Grid(3, 1)]


def workers(grid: Grid) -> list[str]:
    return [f"w{rank}" for rank in range(len(grid))]


def losses(grid: Grid) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(grid)):
        yield from combinations(workers(grid), count)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.pipelines}x{grid.stages}")
def test_fatal_only_when_no_pipeline_has_the_stage(grid: Grid) -> None:
    before = Placement.initial(grid, workers(grid), alike=True)
    for lost in losses(grid):
        after, fatal = before.without(lost)
        held = {c for c, w in (*before.owners, *before.shadows) if w not in lost}
        stages = {c.stage for c in held}
        assert (after is None) == (stages != set(range(grid.stages))), lost
        assert {c.stage for c in fatal}.isdisjoint(stages), lost
        if after is not None:
            assert not set(lost) & {w for _, w in (*after.owners, *after.shadows)}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.pipelines}x{grid.stages}")
def test_new_owner_holds_what_it_copies(grid: Grid) -> None:
    before = Placement.initial(grid, workers(grid), alike=True)
    for lost in losses(grid):
        after, _ = before.without(lost)
        if after is None:
            continue
        for coordinate, owner in after.owners:
            if owner in (before.owner(coordinate), before.shadow(coordinate)):
                continue
            # It has the source from before, as owner or as the shadow that now becomes one.
            held = [c for c in after.hosted_by(owner) if owner in (before.owner(c), before.shadow(c))]
            source = after.copied_from(coordinate, held=held)
            assert source is not None and source.stage == coordinate.stage, (lost, coordinate)


def test_unlike_pipelines_and_single_ones_stay_fatal() -> None:
    pair = ["w0", "w2"]
    assert Placement.initial(Grid(2, 2), workers(Grid(2, 2))).without(pair) == (
        None,
        (Coordinate(0, 0), Coordinate(0, 1)),
    )
    assert not Placement.initial(Grid(1, 4), workers(Grid(1, 4)), alike=True).alike


def test_alike_survives_text_loss_and_protection() -> None:
    placement = Placement.initial(Grid(2, 2), workers(Grid(2, 2)), alike=True)
    assert Placement.from_json(placement.to_json()) == placement
    after, _ = placement.without(["w0"])
    assert after is not None and after.alike and after.protected(["w1", "w2", "w3"]).alike
    assert "alike" not in Placement.initial(Grid(2, 2), workers(Grid(2, 2))).to_json()


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_confined_shadows_of_first_and_last_stages_stay_in_their_pipeline(
    data: st.DataObject, pipelines: int, stages: int
) -> None:
    grid = Grid(pipelines, stages)
    workers = [f"w{rank}" for rank in range(len(grid))]
    placement = Placement.initial(grid, workers)
    for _ in range(data.draw(st.integers(0, 3))):
        lost = data.draw(st.sampled_from(workers))
        after, _ = placement.without([lost])
        if after is None:
            return
        workers.remove(lost)
        placement = after
        confined = placement.protected(workers, confined=True)
        for coordinate, holder in confined.shadows_beyond(placement):
            assert holder != confined.owner(coordinate)
            fed = {c.pipeline for c in confined.hosted_by(holder)}
            assert coordinate.stage not in (0, stages - 1) or coordinate.pipeline in fed
        free = placement.protected(workers)
        assert set(dict(confined.shadows)) <= set(dict(free.shadows))
        if pipelines == 1:
            assert set(dict(confined.shadows)) == set(dict(free.shadows))
        placement = confined
