"""The tool that shows where redundant forwards ran, on traces of known kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import load_script

SCRIPT = load_script("frc_in_bubbles")


def kernel(begin: float, length: float, *, stream: int = 7, name: str = "gemm") -> dict[str, Any]:
    """One kernel, in milliseconds; a trace counts in microseconds."""
    return {"cat": "kernel", "name": name, "ts": begin * 1000, "dur": length * 1000, "args": {"stream": stream}}


def redundant(begin: float, length: float) -> dict[str, Any]:
    return {"cat": "gpu_user_annotation", "name": "FRC 0.1 2", "ts": begin * 1000, "dur": length * 1000, "args": {}}


TRACE = [
    kernel(0, 4),
    kernel(4.1, 1.9),
    kernel(6, 9, stream=25, name="ncclDevKernel_SendRecv"),
    redundant(8, 3),
    kernel(8, 1),
    kernel(9, 2),
    kernel(15.5, 4),
]


def test_idle_time_is_measured_on_the_stream_that_computes() -> None:
    (forward,) = SCRIPT.timeline(TRACE).redundant
    assert (forward.name, forward.begin, forward.length) == ("FRC 0.1 2", 8, 3)
    assert (forward.idle_before, forward.idle_after) == (2, 4.5)


def test_one_at_the_edge_of_a_trace_says_nothing() -> None:
    assert SCRIPT.timeline(TRACE[3:]).redundant == ()


def test_the_command_reads_packed_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "eager-rank0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": TRACE}, file)
    assert SCRIPT.main([str(path)]) == 0
    assert "FRC 0.1 2 at 8.0 ms for 3.0 ms, device idle 2.0 ms before and 4.5 ms after" in capsys.readouterr().out
    path.unlink()
    (tmp_path / "lazy.json").write_text(json.dumps({"traceEvents": TRACE[:3]}))
    assert SCRIPT.main([str(tmp_path / "lazy.json")]) == 1
