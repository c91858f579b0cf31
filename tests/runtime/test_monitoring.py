"""DeepSpeed's csv files, when another worker becomes the reporter: one head a file, whatever is written first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed.comm
import pytest
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.monitor import MonitorMaster

from deepspeed_bamboo.runtime.iteration.monitoring import Event, FollowingMonitor

STEP, EVALUATION, OWN = "Train/Samples/train_loss", "Train/Samples/eval_loss", "Own/accuracy"


def monitors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FollowingMonitor, FollowingMonitor, list[int]]:
    """Those of two workers, and in a list which of them is the reporter."""
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    settings: Any = {"enabled": True, "output_path": str(folder), "job_name": "rows"}
    config = DeepSpeedMonitorConfig(csv_monitor=settings)
    reporter = [0]
    first, second = (
        FollowingMonitor(
            MonitorMaster(config), config=config, reports=lambda rank=rank: reporter[0] == rank, wrote_first=rank == 0
        )
        for rank in (0, 1)
    )
    return first, second, reporter


def rows(folder: Path, name: str) -> list[str]:
    return (folder / "rows" / f"{name}.csv").read_text().splitlines()


@pytest.mark.parametrize("first_word", [STEP, EVALUATION])
def test_files_of_evaluations_have_one_head_whichever_comes_first(
    first_word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, reporter = monitors(tmp_path, monkeypatch)

    def note(name: str, samples: int) -> None:
        for monitor in (first, second):
            monitor.note([(name, 0.5, samples)])

    for samples in (8, 16, 24):
        note(STEP, samples)
    note(EVALUATION, 24)
    reporter[0] = 1
    other = EVALUATION if first_word == STEP else STEP
    for name in (first_word, other, first_word, other):
        note(name, 32 if name == first_word else 40)
    assert rows(tmp_path, "Train_Samples_eval_loss")[:2] == ["step,eval_loss", "24,0.5"]
    for name in ("Train_Samples_eval_loss", "Train_Samples_train_loss"):
        assert [row.partition(",")[0].isdigit() for row in rows(tmp_path, name)].count(False) == 1


def test_a_new_reporter_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, reporter = monitors(tmp_path, monkeypatch)
    assert not (first.reports_newly() or second.reports_newly())
    reporter[0] = 1
    assert [second.reports_newly(), second.reports_newly(), first.reports_newly()] == [True, False, False]
    reporter[0] = 0
    assert not first.reports_newly(), "its script has had rank 0 from the start"


def test_what_a_script_writes_comes_with_a_take_over_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, reporter = monitors(tmp_path, monkeypatch)
    own: list[Event] = [(OWN, 0.25, 8)]
    for monitor in (first, second):
        monitor.note([(STEP, 0.5, 8)])
        monitor.write_events(own)
    reporter[0] = 1
    second.write_events([(OWN, 0.75, 16)])
    assert rows(tmp_path, "Own_accuracy") == ["step,accuracy", "8,0.25", "16,0.75"]
    assert rows(tmp_path, "Train_Samples_train_loss") == ["step,train_loss", "8,0.5"]
