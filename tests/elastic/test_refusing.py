"""What becomes of a start that is refused: given up, tried again, or not wanted any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobNameTaken, LeaseExpired
from deepspeed_bamboo.coordination.records import EndedJob
from deepspeed_bamboo.elastic.command_line import CommandLine
from deepspeed_bamboo.elastic.errors import (
    ExchangeError,
    JobOverError,
    LateError,
    LaunchError,
    NotYetError,
    RefusedError,
)
from deepspeed_bamboo.elastic.exchange_file import FileExchange
from deepspeed_bamboo.elastic.finding import _wanted_once, check_fleet, check_not_over, patience_of
from deepspeed_bamboo.elastic.judging import judge
from deepspeed_bamboo.elastic.outcome import OutcomeNote, SlotNote
from deepspeed_bamboo.elastic.refusing import EXIT_CODES, how_refused
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.errors import ConfigError


def unavailable(reason: str) -> CoordinatorUnavailable:
    return CoordinatorUnavailable(endpoints=["e:1"], tried_seconds=5.0, reason=reason)


def caused_by(cause: Exception) -> LaunchError:
    error = LaunchError("the agent lost its coordinator")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (JobNameTaken("just starting"), "not_yet"),
        (NotYetError("no such job"), "not_yet"),
        (LateError("rank 0 gave no answer"), "not_yet"),
        (unavailable("failed to connect"), "not_yet"),
        (unavailable("PERMISSION_DENIED"), "refused"),
        (unavailable("UNIMPLEMENTED"), "refused"),
        (caused_by(unavailable("failed to connect")), "not_yet"),
        (caused_by(LeaseExpired(7)), "not_yet"),
        (caused_by(unavailable("authentication failed")), "refused"),
        (ExchangeError("another secret"), "refused"),
        (LaunchError("no such script"), "refused"),
        (ConfigError("no such key"), "refused"),
        (JobOverError("complete"), "finished"),
        (RefusedError("rank 0 says why"), "refused"),
        (RefusedError("rank 0 says why", how="not_yet"), "not_yet"),
        (RefusedError("rank 0 says why", how="finished"), "finished"),
        (RefusedError("rank 0 says why", how="user_error"), "refused"),
    ],
)
def test_only_what_time_mends_is_tried_again(error: Exception, how: str) -> None:
    assert how_refused(error) == how
    code = EXIT_CODES[how]
    verdict = judge(code, [SlotNote(how, code, message=str(error)), SlotNote(how, code), SlotNote("begun")])
    assert verdict.kind == {"not_yet": "again", "refused": "give up", "finished": "done"}[how]
    assert verdict.code == {"not_yet": 75, "refused": 2, "finished": 0}[how] and verdict.reason == str(error)


@pytest.mark.parametrize("how", ["refused", "not_yet", "finished"])
def test_the_other_slots_end_as_rank_0_does(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    FileExchange(os.getpid()).refuse(how)
    with pytest.raises(RefusedError, match="rank 0 could not start") as caught:
        FileExchange(os.getpid()).take(within_seconds=1)
    assert how_refused(caught.value) == how
    FileExchange(os.getpid()).close()


def slot(*, machines: int = 1) -> Slot:
    return Slot(0, 0, 2 * machines, 2, node="n", zone="z", master_addr="a", master_port=1)


def test_a_command_that_is_repeated_waits_for_the_job_that_another_machine_starts() -> None:
    line, run = CommandLine("train.py", (), job="gpt"), {"BAMBOO_OUTCOME": "/tmp/x"}
    assert patience_of(line, slot(), {}).seconds == 0
    alone, together = patience_of(line, slot(), run), patience_of(line, slot(machines=2), run)
    assert alone.seconds == 1800 and alone.through_end and together.through_end
    assert 0 < together.seconds < 120, "the other machines' slots, which wait 120 s, are told in time"
    joins = patience_of(CommandLine("train.py", (), job="gpt", join=True), slot(machines=2), {})
    assert joins.seconds == 1800 and not joins.through_end


@pytest.mark.parametrize(
    ("state", "ended", "since", "over"),
    [
        ("finished", 200.0, "100.5", True),
        ("stopped", 200.0, "100.5", True),
        ("failed", 200.0, "100.5", False),  # machines were lost, say
        ("finished", 50.0, "100.5", False),  # another day's
        ("finished", 200.0, None, False),  # by a bare command
        ("finished", 200.0, "yesterday", False),
    ],
)
def test_a_job_that_is_complete_is_not_started_by_a_machine_that_comes_later(
    state: str, ended: float, since: str | None, over: bool
) -> None:
    end = EndedJob("gpt", state, "", 99, ended)
    environment = {"BAMBOO_FLEET": "night"} | ({} if since is None else {"BAMBOO_SINCE": since})
    if not over:
        check_not_over(end, environment)
        return
    with pytest.raises(JobOverError, match=r"'gpt' is \w+ since 1970-01-01 00:03:20 UTC.*ds_bamboo fleet down night`"):
        check_not_over(end, environment)


def test_a_job_whose_script_failed_is_not_begun_by_a_machine_that_comes_later() -> None:
    end = EndedJob("gpt", "failed", "worker n0.0 failed: KeyError: 'x'", 99, 200.0, "user_error")
    check_not_over(end, {})
    check_not_over(end, {"BAMBOO_SINCE": "200.5"})
    with pytest.raises(LaunchError, match=r"'gpt' failed at 1970.*KeyError: 'x'.*give this command again") as refusal:
        check_not_over(end, {"BAMBOO_SINCE": "100.5"})
    assert how_refused(refusal.value) == "refused"


def test_a_command_of_several_jobs_by_one_name_does_all_of_them(tmp_path: Path) -> None:
    environment = {"BAMBOO_OUTCOME": str(tmp_path), "BAMBOO_SINCE": "7"}
    note = OutcomeNote(environment)
    assert _wanted_once(environment) and not _wanted_once({})
    note.write(SlotNote("finished", 2, message="complete since yesterday"))  # by others
    assert _wanted_once(environment)
    note.write(SlotNote("finished"))
    assert not _wanted_once(environment)


def test_machines_of_a_fleet_start_no_jobs_of_their_own() -> None:
    line, fleet = CommandLine("train.py", (), job="gpt"), {"BAMBOO_FLEET": "night"}
    own = BambooConfig()
    shared = BambooConfig.model_validate({"coordinator": {"endpoints": ["etcd:2379"]}})
    check_fleet(line, shared, fleet)
    check_fleet(line, own, fleet, one_machine=False)
    for alone in ({}, {"BAMBOO_FLEET": ""}):
        check_fleet(line, own, alone)
    with pytest.raises(LaunchError, match=r"each machine of fleet 'night' .* set bamboo.coordinator.endpoints"):
        check_fleet(line, own, fleet)
    with pytest.raises(LaunchError, match="add --job NAME"):
        check_fleet(CommandLine("train.py", ()), shared, fleet)
