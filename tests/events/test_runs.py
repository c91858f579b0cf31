"""Several runs in one directory: which one is read, and what is put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.costs import measured_job
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.eventlog.runs import run_name
from deepspeed_bamboo.eventlog.summary import differences, load_run

LOSSES = [4.0, 3.5, 3.0, 2.5, 2.0]
PROFILE = {"forward": [0.02, 0.02], "backward": [0.04, 0.04], "speeds": {}, "handover": 0.0}


def write(
    directory: Path,
    run: str,
    *,
    t: float,
    steps: range,
    losses: list[float] | None = None,
    ended: bool = False,
    failover: int | None = None,
) -> None:
    """A run of two workers in ``directory``, as they write it: each continues its file."""
    known = losses or LOSSES
    for number, worker in enumerate(("w0", "w1")):
        times = iter([t + number / 100 + tick for tick in range(100)])
        log = EventLog(directory, worker, run=run, clock=lambda times=times: next(times))  # type: ignore[misc]
        log.log("checkpoint", epoch=0, step=steps.start, action="expected")
        for step in steps:
            log.log("step", epoch=0, step=step, loss=known[step], samples=8)
        if failover is not None:
            log.log("failover", epoch=1, step=failover, lost=[f"0.{failover}"], pause_seconds={"total": 1.0})
        if ended:
            log.log("finished", epoch=0, step=steps.stop, loss=known[steps.stop - 1], digest="d")
        log.close()


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    write(tmp_path / "reference", "a", t=0, steps=range(5), ended=True)
    return tmp_path / "reference"


def test_each_start_has_a_name_of_its_own_that_people_can_read() -> None:
    assert run_name("gpt2", time_seconds=1.7e9 + 0.0625) == "gpt2@2023-11-14T22:13:20.062Z"
    assert run_name("gpt2", time_seconds=1.9996) == "gpt2@1970-01-01T00:00:02.000Z"


def test_an_unfinished_run_is_not_equal_though_an_earlier_one_in_its_folder_was(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    write(log, "b", t=100, steps=range(5), ended=True)
    write(log, "c", t=200, steps=range(2))
    assert main(["compare", str(reference), str(log)]) == 1
    said = capsys.readouterr().out
    assert "FAILED: last step: 5 and none" in said and "FAILED: digest: d and none" in said
    assert "undisturbed: run a\n" in said
    assert "disturbed: run c; its log has 2 runs, and this is the newest" in said


def test_one_that_ended_before_its_first_step_is_the_newest_too(reference: Path, tmp_path: Path) -> None:
    write(tmp_path / "log", "b", t=100, steps=range(5), ended=True)
    write(tmp_path / "log", "c", t=200, steps=range(0))
    found = load_run(tmp_path / "log")
    assert (found.parts, found.runs, found.losses, found.digest) == (("c",), 2, {}, None)


def test_a_job_that_was_started_again_and_continued_is_one_training(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    write(log, "old", t=50, steps=range(2), losses=[9.0, 8.0])
    write(log, "b", t=100, steps=range(3), failover=1)
    write(log, "c", t=200, steps=range(2, 4), failover=2)  # from the checkpoint after two steps
    write(log, "d", t=300, steps=range(2, 5), ended=True)
    found = load_run(log)
    assert differences(load_run(reference), found) == []
    assert (found.parts, found.runs) == (("b", "c", "d"), 4)
    assert [(one.step, one.epoch) for one in found.failovers] == [(1, 1), (2, 1)], "epochs begin at 0 in each"
    assert main(["compare", str(reference), str(log), "--failovers", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "disturbed: run d, which continues c, b; its log has 4 runs, and this is the newest" in said


def test_steps_that_no_run_has_are_missing(reference: Path, tmp_path: Path) -> None:
    write(tmp_path / "log", "b", t=100, steps=range(1))
    write(tmp_path / "log", "c", t=200, steps=range(2, 5), ended=True)
    found = load_run(tmp_path / "log")
    assert sorted(found.losses) == [2, 3, 4] and found.parts == ("c",)
    assert differences(load_run(reference), found)[0] == "loss of step 0: 4.0 and none"


def test_a_run_that_continues_another_training_than_the_one_before_it_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "b", t=100, steps=range(4), losses=[4.0, 3.5, 3.0, 1.0])
    write(tmp_path, "c", t=200, steps=range(2, 5), ended=True)
    with pytest.raises(EventLogError, match=r"run c begins at step 2, but run b .* step 3 \(1.0, not 2.5\)"):
        load_run(tmp_path)


def measured_events(run: str, *, t: float, samples: int, epoch: int, steps: int = 20) -> list[dict[str, Any]]:
    """One worker with both stages, steps of 0.5 s; a loss whose regrouping takes as many seconds as it has samples."""
    head = {"worker": "a", "run": run}
    events: list[dict[str, Any]] = [
        {**head, "t": t + n / 2, "step": n, "event": "step", "samples": samples, "loss": 1.0, "hosted": ["0.0", "0.1"]}
        for n in range(steps)
    ]
    parts = {"detect": 0.0, "abort": 0.0, "regroup": float(samples)}
    loss = {**head, "t": t + 9, "step": 18, "epoch": epoch, "event": "failover", "pause_seconds": parts}
    told = {**head, "t": t + 8, "step": 16, "event": "profile", "pipelines": 1, "micro_batches": 4, **PROFILE}
    return [*events, told, {**loss, "taken_over": ["0.1"], "regrouped_t": t + 9.0}] if steps > 16 else events


def test_a_profile_is_of_one_run_and_losses_of_others_do_not_count() -> None:
    files = {"a": [*measured_events("b", t=0, samples=64, epoch=1), *measured_events("c", t=50, samples=8, epoch=1)]}
    found = measured_job(files)
    assert (found.samples_per_step, found.counts["losses"], found.costs["regroup_seconds"]) == (8, 1, 8.0)
    assert (found.run, found.runs, found.newer) == ("c", 2, 0)


def test_where_the_newest_run_was_too_short_the_one_before_is_read_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*measured_events("b", t=0, samples=64, epoch=1), *measured_events("c", t=50, samples=8, epoch=1, steps=3)]
    events = [{"epoch": 0, **event} for event in events]
    (tmp_path / "events-a.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["profile", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    written = json.loads(printed.out)
    assert (written["samples_per_step"], written["run"]) == (64, "b")
    assert "run b, one of 2 in the log; 1 newer run ended too early: 1 x 2 stages" in printed.err
