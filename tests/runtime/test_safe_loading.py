"""Files of checkpoints are read without running code from them, and an error names the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.safe_loading import files_named_in_errors, no_code_from_files


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.fixture
def engine() -> Any:
    return SimpleNamespace(checkpoint_engine=TorchCheckpointEngine())


def test_no_code_is_run(engine: Any, tmp_path: Path) -> None:
    file, trace = tmp_path / "layer_00-model_states.pt", tmp_path / "trace"
    for new_form in (False, True):
        torch.save({"weight": torch.ones(2), "code": Code(trace)}, file, _use_new_zipfile_serialization=new_form)
        with no_code_from_files(engine), pytest.raises(CheckpointError, match="only code can rebuild") as raised:
            engine.checkpoint_engine.load(str(file))
        assert str(file) in str(raised.value) and "add_safe_globals" in str(raised.value) and not trace.exists()


def test_what_deepspeed_saves_is_read(engine: Any, tmp_path: Path) -> None:
    file, before = tmp_path / "x.pt", engine.checkpoint_engine
    scaler = DynamicLossScaler(2.0**8, 2.0, 1000, 1.0, 1)
    torch.save({"weight": torch.ones(2), "loss_scaler": scaler, "shape": torch.Size([2])}, file)
    with no_code_from_files(engine):
        found = engine.checkpoint_engine.load(str(file), map_location="cpu")
    assert torch.equal(found["weight"], torch.ones(2)) and found["loss_scaler"].cur_scale == 256
    assert engine.checkpoint_engine is before


def test_numbers_of_numpy_are_read_as_they_were(engine: Any, tmp_path: Path) -> None:
    file, rate = tmp_path / "x.pt", np.interp(3, [0, 10], [0, 1e-3])
    values = [rate, np.float32(0.1), np.int64(7), np.bool_(True), np.linspace(0, 1, 5)]
    torch.save(values, file)
    with no_code_from_files(engine):
        found = engine.checkpoint_engine.load(str(file))
    assert [type(value) for value in found] == [type(value) for value in values]
    assert found[:4] == values[:4] and found[4].tolist() == values[4].tolist()


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "garbage"])
@pytest.mark.parametrize("reading", [no_code_from_files, files_named_in_errors])
def test_an_unreadable_file_is_named(engine: Any, tmp_path: Path, how: str, reading: Any) -> None:
    file = tmp_path / "layer_03-model_states.pt"
    torch.save({"weight": torch.ones(200)}, file)
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"\x00garbage" * 30}[how])
    with reading(engine), pytest.raises(CheckpointError, match=r"layer_03-model_states\.pt"):
        engine.checkpoint_engine.load(str(file), map_location="cpu")
