"""Consecutive stages of one pipeline on one worker run as one stage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_iteration
from deepspeed_bamboo.core.schedule import stage_order
from deepspeed_bamboo.core.verify import verify


@given(
    cut=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    micro_batches=st.integers(1, 9),
)
def test_a_block_runs_the_order_of_one_stage(cut: list[int], micro_batches: int) -> None:
    """Each pass of a block is the passes of its stages, forwards up and backwards down, with nothing in between."""
    grid = Grid(1, sum(cut))
    names = [f"w{number}" for number, length in enumerate(cut) for _ in range(length)]
    owners = {Coordinate(0, stage): name for stage, name in enumerate(names)}
    plan = plan_iteration(Placement.of(grid, owners=owners, shadows={}), micro_batches=micro_batches)
    verify(plan)
    for number, length in enumerate(cut):
        first = sum(cut[:number])
        stages = range(first, first + length)
        expected = [
            (op, stage, m)
            for op, m in stage_order(stages=len(cut), micro_batches=micro_batches, stage=number)
            for stage in (stages if op is Op.FNC else reversed(stages))
        ]
        program = plan.program(f"w{number}")
        found = [
            (i.op, i.coordinate.stage, i.micro_batch) for i in program if i.op in (Op.FNC, Op.BNC) and i.coordinate
        ]
        assert found == expected
