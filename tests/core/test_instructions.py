"""Text forms and JSON forms read back equal; everything else is refused with a remedy."""

import json

import pytest

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import TAIL, Instruction, Op
from deepspeed_bamboo.core.progress import CoordinateProgress, check_progress

ALL = [Instruction(op) if op in TAIL else Instruction(op, Coordinate(1, 12), 30) for op in Op]
SHADOW = [Instruction(op, Coordinate(0, 2), 3, True) for op in Op if op.value.startswith(("SEND", "RECV"))]


@pytest.mark.parametrize("instruction", [*ALL, *SHADOW], ids=str)
def test_text_form_reads_back(instruction: Instruction) -> None:
    assert Instruction.parse(str(instruction)) == instruction


def test_text_form_is_readable() -> None:
    assert [str(i) for i in (ALL[1], SHADOW[2], ALL[-1])] == ["FNC 1.12 30", "SEND_GRAD 0.2 3 shadow", "STEP"]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "begin with one of LOAD, FNC"),
        ("FORWARD 0.1 2", "begin with one of LOAD, FNC"),
        ("FNC", "write FNC PIPELINE.STAGE MICRO_BATCH, as in FNC 0.2 3"),
        ("FNC 0.1", "as in FNC 0.2 3"),
        ("FNC 0.1 -1", "as in FNC 0.2 3"),
        ("FNC 0.1 2 3", "as in FNC 0.2 3"),
        ("FNC 0.1 2 shadow", "as in FNC 0.2 3"),
        ("SEND_GRAD 0.1 2 shade", "as in SEND_GRAD 0.2 3"),
        ("SEND_GRAD 0.1 2 shadow shadow", "as in SEND_GRAD 0.2 3"),
        ("BNC 01 2", "PIPELINE.STAGE"),
        ("STEP 0.1 2", "write it alone"),
    ],
)
def test_other_text_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        Instruction.parse(text)


def test_progress_reads_back_from_json() -> None:
    progress = CoordinateProgress(5, 4, 3, 2, 1)
    assert CoordinateProgress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


@pytest.mark.parametrize(
    "change", [{"forwards": -1}, {"forwards": "2"}, {"forwards": True}, {"forwards": 1.0}, {"fowards": 1}]
)
def test_other_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="progress"):
        CoordinateProgress.from_json({**CoordinateProgress().to_json(), **change})


def test_missing_count_is_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        CoordinateProgress.from_json({"loaded": 1})


@pytest.mark.parametrize(
    ("stage", "counts", "rule"),
    [
        (1, CoordinateProgress(0, 5, 0, 0, 0), r"0\.\.4"),
        (1, CoordinateProgress(0, 1, 1, 2, 2), "follows its forward"),
        (1, CoordinateProgress(0, 1, 2, 0, 0), "needs its activation"),
        (1, CoordinateProgress(0, 2, 2, 0, 1), "needs its gradient"),
        (0, CoordinateProgress(0, 0, 1, 0, 0), "load before"),
        (2, CoordinateProgress(0, 1, 1, 0, 0), "load before"),
        (0, CoordinateProgress(1, 1, 0, 0, 0), "receives no activations"),
        (2, CoordinateProgress(1, 0, 0, 1, 0), "receives no gradients"),
        (3, CoordinateProgress(), "outside the grid"),
    ],
)
def test_impossible_progress_is_refused(stage: int, counts: CoordinateProgress, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_progress({Coordinate(0, stage): counts}, grid=Grid(1, 3), micro_batches=4)


def test_possible_progress_passes() -> None:
    counts = {
        Coordinate(0, 0): CoordinateProgress(4, 0, 3, 2, 1),
        Coordinate(0, 1): CoordinateProgress(0, 3, 3, 2, 2),
        Coordinate(0, 2): CoordinateProgress(3, 4, 3, 0, 2),
    }
    check_progress(counts, grid=Grid(1, 3), micro_batches=4)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        check_progress(counts, grid=Grid(1, 3), micro_batches=3)
