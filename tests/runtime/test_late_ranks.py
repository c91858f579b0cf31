"""Which rank a late worker's script sees until it is one of the job's, without processes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.membership.reconfiguration import expected_coordinate


def member(name: str) -> Member:
    return Member(name, f"node-{name}", "z", "a", 1, 1, 0)


@given(st.integers(1, 2), st.integers(1, 4), st.data())
def test_nobody_but_one_live_worker_is_rank_0(pipelines: int, stages: int, data: st.DataObject) -> None:
    """Whoever was lost before, or nobody: then it will stand by."""
    grid = Grid(pipelines, stages)
    workers = [f"w{index}" for index in range(len(grid))]
    record = EpochRecord(0, tuple(workers), Placement.initial(grid, workers), "start", (), "w0", 0.0)
    lost = data.draw(st.none() | st.sampled_from(workers))
    after = None if lost is None else record.placement.without([lost])[0]
    if after is not None:
        left = tuple(worker for worker in workers if worker != lost)
        record = replace(record, members=left, placement=after.protected(left))
    expected = expected_coordinate(record, map(member, record.members), member("late"))
    assert expected in grid
    assert expected != Coordinate(0, 0) or len(grid) == 1
