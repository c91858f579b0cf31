"""Two runs compared bit by bit, and what ``ds_bamboo compare`` says about them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.files import merge_event_files
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.eventlog.summary import RunSummary, differences, load_run, summarize

PAUSE = {"detect": 0.01, "abort": 0.02, "regroup": 0.03, "recompute": 0.04, "total": 0.1}


def run_of(losses: list[float], *, digest: str | None = "d", final_step: int | None = 3) -> RunSummary:
    return RunSummary(dict(enumerate(losses)), final_step=final_step, digest=digest, failovers=())


def write_run(directory: Path, *, losses: list[float], digest: str = "d", failover: bool = False) -> Path:
    """An event log as two workers write it."""
    logs = [EventLog(directory, worker) for worker in ("w0", "w1")]
    for step, loss in enumerate(losses):
        for log in logs:
            log.log("step", epoch=0, step=step, loss=loss, samples=8, seconds=0.1)
    if failover:
        logs[1].log("failover", epoch=1, step=1, lost=["0.1"], taken_over=["0.1"], pause_seconds=PAUSE)
        logs[0].log("failover", epoch=1, step=1, lost=["0.1"], taken_over=[], pause_seconds={"total": 9.0})
    for log in logs:
        log.log("finished", epoch=1, step=len(losses), loss=losses[-1], digest=digest)
    merge_event_files(directory)
    return directory


def test_equal_runs_differ_in_nothing() -> None:
    assert differences(run_of([3.0, math.nan, 0.0]), run_of([3.0, math.nan, 0.0])) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (run_of([3.0, math.nextafter(2.0, 3), 1.0]), "loss of step 1"),
        (run_of([3.0, 2.0]), "loss of step 2: 1.0 and none"),
        (run_of([3.0, 2.0, 1.0], digest="e"), "digest: d and e"),
        (run_of([3.0, 2.0, 1.0], digest=None), "digest: d and none"),
        (run_of([3.0, 2.0, 1.0], final_step=None), "last step: 3 and none"),
    ],
)
def test_a_difference_is_named(other: RunSummary, expected: str) -> None:
    found = differences(run_of([3.0, 2.0, 1.0]), other)
    assert len(found) == 1
    assert expected in found[0]


def test_runs_without_a_digest_are_never_equal() -> None:
    (found,) = differences(run_of([1.0], digest=None), run_of([1.0], digest=None))
    assert "engine.log_event('finished', digest=engine.state_digest())" in found


def test_a_log_that_nobody_has_merged_is_read_too(tmp_path: Path) -> None:
    merged = load_run(write_run(tmp_path, losses=[2.0, 1.0], failover=True))
    (tmp_path / "events.jsonl").unlink()
    assert load_run(tmp_path) == merged and merged.losses == {0: 2.0, 1: 1.0}
    with pytest.raises(EventLogError, match=r"there is no event log in .*bamboo\.event_log"):
        load_run(tmp_path / "elsewhere")


def test_what_workers_have_written_counts_and_not_a_merged_file_from_before(tmp_path: Path) -> None:
    write_run(tmp_path, losses=[2.0, 1.0])
    for file in tmp_path.glob("events-*.jsonl"):
        file.write_text(file.read_text().replace('"loss": 1.0', '"loss": 1.0000000000000002'))
    assert load_run(tmp_path).losses == {0: 2.0, 1: 1.0000000000000002}


def test_a_merged_file_alone_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, losses=[2.0, 1.0])
    for file in tmp_path.glob("events-*.jsonl"):
        file.unlink()
    assert load_run(tmp_path).losses == {0: 2.0, 1: 1.0}


def test_of_several_runs_in_one_directory_the_newest_counts(tmp_path: Path) -> None:
    for number, run in enumerate(("a", "b")):
        for worker in ("w0", "w1"):
            log = EventLog(tmp_path, worker, run=run, clock=lambda number=number: float(number))
            log.log("step", epoch=0, step=0, loss=float(number))
    assert load_run(tmp_path).losses == {0: 1.0}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"event": "step", "step": 1, "loss": 1.0}',
        '{"t": "now", "event": "step", "step": 1, "loss": 1.0}',
        '{"t": 1.0, "event": "step", "step": 1}',
        '{"t": 1.0, "event": "step", "step": 1, "loss": "1.0"}',
        '{"t": 1.0, "event": "step", "step": "1", "loss": 1.0}',
        '{"t": 1.0, "event": "finished", "step": 1, "loss": 1.0, "digest": 5}',
        '{"t": 1.0, "event": "failover", "step": 1, "epoch": 1, "pause_seconds": {"total": "long"}}',
        '{"t": 1.0, "event": "failover", "step": 1, "epoch": "one"}',
        "\udcff",
    ],
)
def test_a_damaged_line_is_named_with_file_and_number(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", losses=[2.0, 1.0])
    bad = write_run(tmp_path / "bad", losses=[2.0, 1.0]) / "events-w1.jsonl"
    lines = bad.read_bytes().split(b"\n")
    lines[1] = line.encode("utf-8", errors="surrogateescape")
    bad.write_bytes(b"\n".join(lines))
    assert main(["compare", str(tmp_path / "good"), str(tmp_path / "bad")]) == 1
    assert f"{bad}, line 2: " in capsys.readouterr().err


def test_fall_is_a_share_of_the_first_loss() -> None:
    assert run_of([4.0, 9.0, 3.0]).fall == 0.25
    assert run_of([]).fall == 0.0


def test_of_all_survivors_reports_that_of_the_new_owner_counts() -> None:
    events: list[dict[str, Any]] = [
        {"t": 9.5, "event": "fault", "step": 1},
        {"t": 10.0, "event": "fault", "step": 2},
        {
            "event": "failover",
            "epoch": 1,
            "step": 2,
            "lost": ["0.1"],
            "taken_over": [],
            "pause_seconds": {"total": 9.0},
        },
        {
            "event": "failover",
            "epoch": 1,
            "step": 2,
            "lost": ["0.1"],
            "taken_over": ["0.1"],
            "pause_seconds": PAUSE,
            "first_recomputed_t": 10.25,
        },
    ]
    (failover,) = summarize(events).failovers
    assert failover.pause_seconds == PAUSE
    assert failover.lost == ("0.1",)
    assert failover.kill_to_recompute_seconds == 0.25


class TestCommand:
    def test_equal_runs_with_the_expected_failover_pass(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = write_run(tmp_path / "one", losses=[4.0, 3.0, 2.0])
        other = write_run(tmp_path / "other", losses=[4.0, 3.0, 2.0], failover=True)
        assert main(["compare", str(one), str(other), "--failovers", "1", "--minimum-fall", "30"]) == 0
        output = capsys.readouterr().out
        assert "0.1 lost and taken over" in output
        assert "an epoch is a membership that all workers have agreed on" in output
        assert max(map(len, output.splitlines())) <= 80, "a terminal's width"
        pause = "pause 0.100 s: detect 0.010 s, abort 0.020 s, regroup 0.030 s, recompute 0.040 s"
        assert pause in " ".join(output.split())
        assert "equal: every training loss and the digest, bit for bit; the loss fell by 50%" in output

    @pytest.mark.parametrize(
        ("losses", "digest", "failover", "expected"),
        [
            ([4.0, 3.0, 2.5], "d", True, "loss of step 2: 2.0 and 2.5"),
            ([4.0, 3.0, 2.0], "e", True, "digest: d and e"),
            ([4.0, 3.0, 2.0], "d", False, "0 failovers instead of 1"),
        ],
    )
    def test_anything_else_fails(
        self,
        losses: list[float],
        digest: str,
        failover: bool,
        expected: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        one = write_run(tmp_path / "one", losses=[4.0, 3.0, 2.0])
        other = write_run(tmp_path / "other", losses=losses, digest=digest, failover=failover)
        assert main(["compare", str(one), str(other), "--failovers", "1"]) == 1
        assert f"FAILED: {expected}" in capsys.readouterr().out

    def test_a_loss_that_did_not_fall_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        one = write_run(tmp_path / "one", losses=[4.0, 3.0])
        assert main(["compare", str(one), str(one), "--minimum-fall", "30"]) == 1
        assert "25.0% only" in capsys.readouterr().out

    def test_a_missing_run_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
        assert "there is no event log in" in capsys.readouterr().err
