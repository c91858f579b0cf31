"""Whether a command is given again: one rule for every way in which its processes can end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.elastic.interruptions import by_signal
from deepspeed_bamboo.elastic.judging import Patience, judge
from deepspeed_bamboo.elastic.outcome import OutcomeNote, SlotNote, read_notes
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.protocol import OUTCOME
from tests.coordination.helpers import wait_until
from tests.elastic.launched import LaunchedJob

DONE, AGAIN, GIVE_UP = "done", "again", "give up"
BEGUN, ENDED_WELL = SlotNote("begun"), SlotNote("finished", 0, 9)


@pytest.mark.parametrize(
    ("code", "notes", "kind", "exit_code"),
    [
        (0, [ENDED_WELL, ENDED_WELL], DONE, 0),
        (247, [ENDED_WELL, BEGUN], DONE, 0),  # the killed agent's part was taken over
        (247, [BEGUN, SlotNote("interrupted", 143)], AGAIN, 75),  # its launcher ends the others then
        (0, [SlotNote("interrupted", 129)] * 2, AGAIN, 75),  # the node's launcher was killed
        (0, [SlotNote("left", 129)], AGAIN, 75),  # the same on one of several machines
        (1, [SlotNote("interrupted", 1)] * 2, AGAIN, 75),  # and what the other machines see of it
        (75, [SlotNote("fatal_loss", 75, 4)] * 2, AGAIN, 75),
        (75, [SlotNote("hang", 75)], AGAIN, 75),
        (75, [SlotNote("no_machines", 75)] * 2, AGAIN, 75),
        (1, [SlotNote("user_error", 1, 4), SlotNote("user_error", 1, 4)], GIVE_UP, 1),
        (247, [SlotNote("user_error", 1, 4), BEGUN], GIVE_UP, 1),
        (1, [SlotNote("no_start", 1)], GIVE_UP, 1),
        (2, [SlotNote("refused", 2, message="no such file")], GIVE_UP, 2),
        (1, [SlotNote("stopped", 1)], GIVE_UP, 1),
        (143, [SlotNote("interrupted", 143)] * 2, GIVE_UP, 143),  # somebody ended the command
        (0, [SlotNote("left", 0)], DONE, 0),  # drained
        (75, [SlotNote("not_yet", 75), BEGUN], AGAIN, 75),  # another machine was just starting the job, or ending it
        (75, [SlotNote("not_yet", 75), SlotNote("refused", 2)], GIVE_UP, 2),
        (0, [SlotNote("plain")] * 2, DONE, 0),
        (5, [SlotNote("plain")] * 2, GIVE_UP, 5),
        (0, [], DONE, 0),
        (75, [], AGAIN, 75),
        (-9, [], AGAIN, 75),
        (-40, [], AGAIN, 75),  # a real-time signal, which has no name
        (2, [], GIVE_UP, 2),
    ],
)
def test_one_rule_for_all_ends(code: int, notes: list[SlotNote], kind: str, exit_code: int) -> None:
    verdict = judge(code, notes)
    assert (verdict.kind, verdict.code) == (kind, exit_code) and verdict.reason


def test_who_interrupts_the_wrapper_wants_no_other_run() -> None:
    verdict = judge(0, [SlotNote("fatal_loss", 75)], signalled=signal.SIGTERM)
    assert (verdict.kind, verdict.code) == (GIVE_UP, 143)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert judge(-40, []).reason == "the command was killed by signal 40"
    assert judge(-9, []).reason == "the command was killed by SIGKILL"
    assert judge(0, [], signalled=40).reason == "signal 40 was sent to ds_bamboo run"
    assert by_signal(40, Slot(0, 0, 1, 1, "n0", "", "127.0.0.1", 1)).startswith("signal 40 was sent")


def test_thousands_of_pauses_are_no_longer_than_the_longest() -> None:
    patience = Patience(pause_seconds=10.0, fruitless_limit=5000, fruitless=4000)
    assert patience.next_pause_seconds([]) == patience.longest_pause_seconds


def test_it_pauses_longer_and_gives_up_while_no_run_gets_on() -> None:
    patience = Patience(pause_seconds=1.0, longest_pause_seconds=3.0, fruitless_limit=4)
    ends = [[SlotNote("fatal_loss", 75, step)] for step in (5, 5, 3, 5, 8, 8, 8, 8, 8)]
    assert [patience.next_pause_seconds(notes) for notes in ends] == [1, 1, 2, 3, 1, 1, 2, 3, None]


def test_the_last_word_of_each_slot_counts(tmp_path: Path) -> None:
    note = OutcomeNote({OUTCOME: str(tmp_path)})
    note.write(SlotNote("begun"))
    note.write(SlotNote("fatal_loss", 75, 12, "too much was lost"))
    (tmp_path / "slot-77").write_text('{"how": "begun", "code": 0, "step": -1, "message": ""}\n')
    (tmp_path / "slot-78").write_text("half a li")
    said = sorted(read_notes(tmp_path), key=lambda note: note.code)
    assert said == [SlotNote("begun"), SlotNote("fatal_loss", 75, 12, "too much was lost")]
    OutcomeNote({}).write(SlotNote("begun"))


def test_a_command_is_given_again_until_it_has_done_its_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    count = tmp_path / "count"
    script = f"import pathlib, sys; f = pathlib.Path({str(count)!r}); n = len(f.read_text()) if f.exists() else 0; "
    script += "f.write_text('x' * (n + 1)); sys.exit(75 if n < 2 else 0)"
    assert main(["run", "--pause-seconds", "0.01", "--", sys.executable, "-c", script]) == 0
    assert count.read_text() == "xxx"
    assert capfd.readouterr().err.count("again in") == 2
    assert main(["run", "--once", "--", sys.executable, "-c", "import sys; sys.exit(75)"]) == 75
    # A first start may follow a job of this name that is just ending; a repeat finds what it began itself.
    since = "import os, sys, time; its = os.environ['BAMBOO_SINCE']; "
    since += "sys.exit(time.time() - float(its) > 60 if its else 75)"
    assert main(["run", "--pause-seconds", "0.01", "--", sys.executable, "-c", since]) == 0
    assert main(["run", "--", sys.executable, "-c", "import sys; sys.exit(3)"]) == 3
    assert main(["run", "--fruitless", "1", "--", sys.executable, "-c", "import sys; sys.exit(75)"]) == 75
    assert main(["run", "--"]) == 1 and main(["run", "--", "no-such-command"]) == 1


@pytest.mark.parametrize(
    ("number", "terminal", "passed_on"), [("TERM", True, True), ("INT", False, True), ("INT", True, False)]
)
def test_a_signal_is_passed_on_unless_the_terminal_has_done_so(
    number: str, terminal: bool, passed_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() if terminal else -1)
    wanted = getattr(signal, f"SIG{number}")
    script = "import os, pathlib, signal, sys, time; number, heard = int(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
    script += "signal.signal(number, lambda *_: heard.write_text('heard'))\n"
    script += "os.kill(os.getppid(), number)\nfor _ in range(50): heard.exists() or time.sleep(0.01)"
    heard = tmp_path / "heard"
    assert main(["run", "--", sys.executable, "-c", script, str(int(wanted)), str(heard)]) == 128 + wanted
    assert heard.exists() is passed_on


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_a_killed_launcher_or_agent_asks_for_another_run(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path, victim: str
) -> None:
    """DeepSpeed's command ends with 0 and with 247 then."""
    script = """
        training = FakeTraining()
        training.begin()
        print("in epoch 0", flush=True)
        training.wait()
    """
    with launch_job(tmp_path, script, command=True, run=("--once",)) as job:
        job.wait_for("in epoch 0", times=2, within_seconds=180)
        (command,) = psutil.Process(job.process.pid).children()
        (launcher,) = command.children()
        os.kill(launcher.pid if victim == "launcher" else job.slot(1), signal.SIGKILL)
        assert job.wait(within_seconds=120) == 75, job.output
        wait_until(lambda: not launcher.is_running(), within_seconds=60, what="the launcher's end")
    assert f"{victim} was killed" in job.output, job.output
