"""The sweep's judgement, with jobs that only pretend."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepspeed_bamboo.config.section import load_deepspeed_settings
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.sweep.cases import Case, at_random, select
from deepspeed_bamboo.sweep.job import PAST_LIMIT, JobResult, run_job
from deepspeed_bamboo.sweep.outside import OutsideKill, OutsideKiller
from deepspeed_bamboo.sweep.rows import Row, table_line, total_lines, totals
from deepspeed_bamboo.sweep.sweep import Sweep

ROOT = Path(__file__).parent.parent.parent
PAUSE = {"detect": 0.1, "abort": 0.0, "regroup": 0.1, "recompute": 0.2, "total": 0.4}


class PretendedJob:
    """Writes the events that a job would, with faults in how it deals with faults."""

    def __init__(self, *, wrong_loss: bool = False, strikes: bool = True, recovers: bool = True, code: int = 0) -> None:
        self.wrong_loss = wrong_loss
        self.strikes = strikes
        self.recovers = recovers
        self.code = code
        self.calls: list[tuple[Sequence[str], int]] = []

    def __call__(self, script: Sequence[str], *, workers: int, folder: Path, outside: object) -> JobResult:
        self.calls.append((script, workers))
        settings = load_deepspeed_settings(script[script.index("--deepspeed_config") + 1])
        faults = FaultScript.parse(settings["bamboo"]["faults"])
        log = EventLog(script[script.index("--event-log") + 1], "w0")
        disturbed = bool(faults.faults)
        for step in range(3):
            loss = 4.0 - step + (0.5 if disturbed and self.wrong_loss and step == 2 else 0)
            log.log("step", epoch=0, step=step, loss=loss, samples=8, seconds=0.1)
        if disturbed and self.strikes:
            log.log("fault", epoch=0, step=1)
        if disturbed and self.recovers:
            log.log("failover", epoch=1, step=1, lost=["0.1"], taken_over=["0.1"], pause_seconds=PAUSE)
        if not (disturbed and self.code):
            log.log("finished", epoch=0, step=3, loss=2.0, digest="d")
        return JobResult(self.code if disturbed else 0, 1.5, folder / "output.txt")


def cases() -> list[Case]:
    return select("quick")[:2]


def rows_of(job: PretendedJob, folder: Path) -> list[Row]:
    return list(Sweep(root=ROOT, folder=folder, job=job).rows(cases(), jobs=2))


def test_equal_runs_pass_and_leave_nothing(tmp_path: Path) -> None:
    job = PretendedJob()
    rows = rows_of(job, tmp_path)
    assert [row.case for row in rows] == [case.name for case in cases()]
    assert all(row.passed for row in rows)
    assert [path.name for path in (tmp_path / "M4").iterdir()] == ["undisturbed"]
    assert len(job.calls) == 3  # one undisturbed run for both
    assert {workers for _, workers in job.calls} == {4}


def test_no_case_runs_inside_the_folder_of_another(tmp_path: Path) -> None:
    """Which is removed when that one is done, or begins: two faults, of which the first is a case of its own."""
    job = PretendedJob()
    both = [next(case for case in select("full") if len(case.faults.faults) == 2)]
    both.append(dataclasses.replace(both[0], faults=FaultScript(both[0].faults.faults[:1])))
    assert both[0].name.startswith(both[1].name + "/")
    assert len(list(Sweep(root=ROOT, folder=tmp_path, job=job).rows(both, jobs=1))) == 2
    folders = [Path(script[script.index("--deepspeed_config") + 1]).parent for script, _ in job.calls]
    assert len(folders) == 3 and not any(one in other.parents for one in folders for other in folders)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (PretendedJob(wrong_loss=True), "loss of step 2: 2.0 and 2.5"),
        (PretendedJob(strikes=False), "0 of 1 scripted faults happened"),
        (PretendedJob(recovers=False), "no failover was logged"),
        (PretendedJob(code=3), "exit code 3"),
        (PretendedJob(code=PAST_LIMIT), "had not ended after 2 s"),
    ],
)
def test_whatever_is_wrong_is_said_and_kept(job: PretendedJob, expected: str, tmp_path: Path) -> None:
    for row in rows_of(job, tmp_path):
        assert not row.passed
        assert expected in "; ".join(row.problems)
        assert (tmp_path / row.case / "events").is_dir()
        assert table_line(row).startswith("WRONG")


def test_a_failing_undisturbed_run_is_said(tmp_path: Path) -> None:
    def job(script: Sequence[str], *, workers: int, folder: Path, outside: object) -> JobResult:
        return JobResult(1, 1.0, folder / "output.txt")

    rows = list(Sweep(root=ROOT, folder=tmp_path, job=job).rows(cases()))
    assert [row.case for row in rows] == [case.name for case in cases()]
    assert all(re.match(r"undisturbed run of M4.*output\.txt", row.problems[0]) for row in rows)


def test_totals_count_and_take_medians(tmp_path: Path) -> None:
    rows = [*rows_of(PretendedJob(), tmp_path), Row("x", 1.0, ("bad",))]
    assert totals(rows) == {
        "cases": 3,
        "equal": 2,
        "pause_seconds": {part: {"median": value, "maximum": value} for part, value in PAUSE.items()},
    }
    assert total_lines(rows)[0] == "2 of 3 cases bitwise equal to the undisturbed run"
    assert total_lines(rows)[-1] == "WRONG x: bad"
    assert "total 0.400" in table_line(rows[0])


class TestKillsFromOutside:
    def test_they_come_after_their_step_and_once(self, tmp_path: Path) -> None:
        log, struck = EventLog(tmp_path, "w0"), threading.Event()
        strikes: list[int] = []

        def strike(rank: int) -> None:
            strikes.append(rank)
            struck.set()

        with OutsideKiller(OutsideKill(2, after_step=1, delay_seconds=0.01), events=tmp_path, strike=strike) as killer:
            log.log("step", epoch=0, step=0)
            assert not struck.wait(0.1)
            log.log("step", epoch=0, step=1)
            assert struck.wait(10)
            log.log("step", epoch=0, step=2)
        assert strikes == [2]
        assert killer.struck

    def test_a_job_that_ends_before_is_left_alone(self, tmp_path: Path) -> None:
        kill = OutsideKill(2, after_step=1, delay_seconds=0.0)
        with OutsideKiller(kill, events=tmp_path / "none", strike=pytest.fail) as killer:
            pass
        assert not killer.struck

    def test_a_case_whose_kill_did_not_come_is_wrong(self, tmp_path: Path) -> None:
        case = next(iter(at_random(1)))
        (row,) = Sweep(root=ROOT, folder=tmp_path, job=PretendedJob()).rows([case])
        assert "0 of 1 scripted faults happened" in row.problems

    def test_the_launcher_cannot_do_it(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="without the launcher"):
            run_job([], workers=1, folder=tmp_path, outside=OutsideKill(0, 0, 0.0))


class TestRunningAJob:
    """With a stand-in for DeepSpeed's launcher on the PATH."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        launcher = tmp_path / "bin" / "deepspeed"
        launcher.parent.mkdir()
        launcher.write_text(
            f'#!/bin/sh\nwhile [ "$1" != script ]; do shift; done\nshift\nexec {sys.executable} -c "$@"\n'
        )
        launcher.chmod(0o755)
        monkeypatch.setenv("PATH", str(launcher.parent), prepend=":")
        return tmp_path / "job"

    def test_exit_code_and_output_come_back(self, folder: Path) -> None:
        result = run_job(["script", "print('hello'); raise SystemExit(7)"], workers=2, folder=folder)
        assert result.exit_code == 7
        assert result.output.read_text() == "hello\n"

    def test_a_job_inherits_no_faults(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BAMBOO_FAULTS", "elsewhere")
        result = run_job(
            ["script", "import os; print(os.environ.get('BAMBOO_FAULTS') or None)"], workers=2, folder=folder
        )
        assert result.output.read_text() == "None\n"

    def test_nothing_survives_the_limit(self, folder: Path) -> None:
        code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
        result = run_job(["script", code], workers=2, folder=folder, limit_seconds=1.0)
        assert result.exit_code == PAST_LIMIT
        status = Path(f"/proc/{result.output.read_text().strip()}/stat")
        assert not status.exists() or status.read_text().split()[2] == "Z"
