"""scripts/gpu_criteria.py: its verdicts and commands. What it runs needs GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import SCRIPTS, load_script

SCRIPT = load_script("gpu_criteria")


def row(ratio: float | None, *, peak: int, limit: int | None = None) -> dict[str, Any]:
    return {
        "throughput_against_stock": ratio,
        "peak_device_bytes_by_worker": [peak, peak],
        "memory_limit_bytes_by_worker": [limit, limit] if limit else [],
    }


def speed(*, off: float = 1.0, eager: float = 0.95, peak: int = 150) -> list[str]:
    return SCRIPT.judge_speed(  # type: ignore[no-any-return]
        {
            "variants": {
                "stock": row(1.0, peak=90),
                "off": row(off, peak=100),
                "lazy": row(1.0, peak=150),
                "eager-recompute": row(eager, peak=peak, limit=150),
            }
        }
    )


def test_throughput_and_memory_are_held_against_their_goals() -> None:
    assert [line.endswith(": met") for line in speed()] == [True] * 4
    assert [line for line in speed(off=0.99) if "NOT MET" in line] == ["1 off 0.990 of stock, goal 1.00: NOT MET"]
    assert [line for line in speed(eager=0.94) if "NOT MET" in line] == [
        "1 eager-recompute 0.940 of stock, goal 0.95: NOT MET"
    ]
    assert next(line for line in speed(peak=166) if "NOT MET" in line).startswith(
        "5 eager-recompute peak at most 1.107"
    )


def test_the_limit_of_memory_is_offs_peak_and_the_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    rows = {
        "off": {"peak_device_bytes_by_worker": [100, 90], "static_bytes_by_worker": [50, 40]},
        "lazy": {"peak_device_bytes_by_worker": [150, 120], "static_bytes_by_worker": [100, 90]},
        "eager-cpu": {"peak_device_bytes_by_worker": [160, 140], "static_bytes_by_worker": [100, 90]},
    }
    bench = load_script("bench_gpu")
    bench.add_memory_limits(rows)
    assert rows["eager-cpu"]["memory_limit_bytes_by_worker"] == [150, 140]
    (line,) = bench.memory_lines(rows)
    assert line.endswith("(1.067), 0.00 of 0.00 GiB (1.000)")


def test_pauses_restart_and_equality_are_held_against_their_goals() -> None:
    good = {
        "pauses": [{"to_recompute": seconds} for seconds in (0.2, 0.4, 0.5)],
        "restart": {"to_first_step": 40.0},
        "loss_difference": 0.0,
        "problems": [],
    }
    assert [line.endswith(": met") for line in SCRIPT.judge_losses([good])] == [True] * 3
    slow = {**good, "pauses": [{"to_recompute": seconds} for seconds in (0.2, 0.4, 3.5)]}
    assert [line[0] for line in SCRIPT.judge_losses([slow]) if "NOT MET" in line] == ["2"]
    unlike = {**good, "problems": ["digest: a and b"]}
    assert [line[0] for line in SCRIPT.judge_losses([unlike]) if "NOT MET" in line] == ["4"]
    quick = {**good, "restart": {"to_first_step": 3.0}}
    assert [line[0] for line in SCRIPT.judge_losses([quick]) if "NOT MET" in line] == ["3"]


def test_a_late_part_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = SCRIPT.Part("slow", 1, ("-c", "import time; time.sleep(60)"), lambda value: [])
    monkeypatch.setattr(SCRIPT, "command_of", lambda part, **rest: ["python", *part.arguments])
    (line,) = SCRIPT.run(part, output=tmp_path, limit_seconds=1.0)
    assert "late" in line
    assert (tmp_path / "slow.txt").read_text().strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("gpus", [2, 4])
def test_the_benchmarks_know_all_options_that_they_are_called_with(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    arguments = SCRIPT.argparse.Namespace(gpus=gpus, model="gpt2-medium", small_model="gpt2-small")
    for part in SCRIPT.parts(arguments):
        script, *rest = part.arguments
        parse = load_script(script.removesuffix(".py")).parse_arguments
        parse([*rest, "--limit-seconds", "5", "--output", "x.json"])


def test_it_shows_its_commands() -> None:
    shown = subprocess.run(
        ["python", str(SCRIPTS / "gpu_criteria.py"), "--show", "--parts", "kills"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("\n") == 1
    assert "--offload recompute" in shown.stdout
