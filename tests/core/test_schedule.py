"""The 1F1B and inference orders: against DeepSpeed's own schedules, and against readable golden files."""

from pathlib import Path

import pytest

from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.schedule import inference_order, stage_order

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_GRIDS = [(1, 3), (2, 1), (3, 2), (4, 4), (4, 8), (8, 3)]


def drawn(*, stages: int, micro_batches: int) -> list[str]:
    """One line a stage: ``stage 0: F0 F1 B0 B1``."""
    letters = {Op.FNC: "F", Op.BNC: "B"}
    return [
        f"stage {stage}: "
        + " ".join(
            f"{letters[op]}{m}" for op, m in stage_order(stages=stages, micro_batches=micro_batches, stage=stage)
        )
        for stage in range(stages)
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), GOLDEN_GRIDS)
def test_order_is_the_golden_one(stages: int, micro_batches: int) -> None:
    golden = (GOLDEN / f"1f1b_{stages}x{micro_batches}.txt").read_text().splitlines()
    assert drawn(stages=stages, micro_batches=micro_batches) == golden


@pytest.mark.parametrize("stages", range(1, 9))
def test_orders_are_deepspeeds(stages: int) -> None:
    schedules = pytest.importorskip(
        "deepspeed.runtime.pipe.schedule", reason="requires deepspeed, to compare with its schedules"
    )
    ops = {schedules.ForwardPass: Op.FNC, schedules.BackwardPass: Op.BNC}

    def stock(kind: type, micro_batches: int, stage: int) -> list[Op]:
        steps = kind(micro_batches=micro_batches, stages=stages, stage_id=stage)
        return [ops[type(command)] for step in steps for command in step if type(command) in ops]

    for micro_batches in range(1, 17):
        for stage in range(stages):
            where = {"stages": stages, "micro_batches": micro_batches, "stage": stage}
            train, inference = stage_order(**where), inference_order(**where)
            assert [op for op, _ in train] == stock(schedules.TrainSchedule, micro_batches, stage), where
            assert [op for op, _ in inference] == stock(schedules.InferenceSchedule, micro_batches, stage), where
            for op in (Op.FNC, Op.BNC):  # stock names buffers, not micro-batches: each pass is in micro-batch order
                assert [m for o, m in train if o is op] == list(range(micro_batches)), where
            assert [m for _, m in inference] == list(range(micro_batches)), where


@pytest.mark.parametrize("order", [stage_order, inference_order])
@pytest.mark.parametrize(
    ("stage", "micro_batches", "rule"), [(2, 4, r"0\.\.1"), (-1, 4, r"0\.\.1"), (0, 0, "at least 1 micro-batch")]
)
def test_impossible_stage_is_refused(order: object, stage: int, micro_batches: int, rule: str) -> None:
    assert callable(order)
    with pytest.raises(ValueError, match=rule):
        order(stages=2, micro_batches=micro_batches, stage=stage)
