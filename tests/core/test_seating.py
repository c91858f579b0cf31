from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.seating import Seat, logical_grid, seats

GRIDS = st.builds(Grid, st.integers(1, 4), st.integers(1, 9))


@pytest.mark.parametrize(
    ("stages", "workers", "pipelines", "expected"),
    [
        (8, 3, None, Grid(1, 8)),
        (4, 8, None, Grid(2, 4)),
        (4, 7, None, Grid(1, 4)),
        (4, 3, 2, Grid(2, 4)),
        (4, 8, 1, Grid(1, 4)),
        (1, 3, None, Grid(3, 1)),
    ],
)
def test_the_grid_is_the_users_or_what_the_workers_fill(
    stages: int, workers: int, pipelines: int | None, expected: Grid
) -> None:
    assert logical_grid(stages=stages, workers=workers, pipelines=pipelines) == expected


@given(grid=GRIDS, workers=st.integers(1, 40))
def test_every_coordinate_has_one_seat_and_seats_are_even(grid: Grid, workers: int) -> None:
    given_out = seats(grid, workers)
    assert len(given_out) == workers
    assert sorted(c for seat in given_out for c in seat) == sorted(grid)
    sizes = [len(seat) for seat in given_out]
    assert max(sizes) - min(sizes) <= 1
    if workers < len(grid):
        assert [c for seat in given_out for c in seat] == list(grid), "runs of neighbours"
    else:
        assert [seat[0] for seat in given_out[: len(grid)]] == sorted(grid, key=grid.rank), "the launcher's ranks"


def test_eight_stages_on_three_workers() -> None:
    assert [len(seat) for seat in seats(Grid(1, 8), 3)] == [3, 3, 2]


@given(grid=GRIDS, workers=st.integers(1, 40))
def test_the_first_placement_hosts_what_the_seats_say(grid: Grid, workers: int) -> None:
    names = [f"w{index}" for index in range(workers)]
    placement = Placement.initial(grid, names)
    for index, name in enumerate(names):
        seat = Seat(grid, index, workers)
        assert placement.hosted_by(name) == tuple(c for c in grid if c in seat.hosted)
        assert seat.primary in (seat.hosted or tuple(grid))
        assert set(seat.stages) == {c.stage for c in seat.hosted} or not seat.hosted
    unprotected = [c for c in grid if placement.shadow(c) is None]
    assert not unprotected or min(workers, len(grid)) == 1


def test_nobody_can_start_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        seats(Grid(1, 1), 0)
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        logical_grid(stages=1, workers=0)


def test_a_seat_knows_who_hosts_what() -> None:
    assert Seat(Grid(1, 3), 0, 2).owners() == {Coordinate(0, 0): 0, Coordinate(0, 1): 0, Coordinate(0, 2): 1}
