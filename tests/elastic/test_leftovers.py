"""What a worker left is ended, and nobody who was given its number later."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from deepspeed_bamboo.elastic import leftovers
from deepspeed_bamboo.elastic.leftovers import WorkerSessions, processes_of_session, signal_session
from tests.coordination.helpers import wait_until


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session of its own."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def led(command: str) -> tuple[int, int]:
    """Session and one process of it, whose leader has ended."""
    leader = subprocess.Popen(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    left = int(leader.stdout.readline())
    leader.stdout.close()
    leader.wait()
    return leader.pid, left


def test_what_a_worker_left_is_ended_even_where_it_does_not_hear_sigterm() -> None:
    session, left = led("(trap '' TERM; exec sleep 60 >&-) & echo $!")
    sessions = WorkerSessions()
    sessions.begin("0", session)
    assert sessions.running("0") == session
    sessions.end("0", signalled=True)
    assert sessions.running("0") is None and processes_of_session(session) == [left]
    sessions.kill()
    wait_until(lambda: processes_of_session(session) == [])


def test_a_number_that_somebody_else_was_given_is_left_alone(stranger: subprocess.Popen[bytes]) -> None:
    """The session of a worker of whom nothing was left is forgotten, though its number is in use again."""
    sessions = WorkerSessions()
    sessions.begin("0", stranger.pid)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(leftovers, "processes_of_session", lambda session: [])
        sessions.end("0", signalled=True)
    assert sessions.pid("0") is None
    sessions.kill()
    assert stranger.poll() is None


def test_a_session_counts_as_the_workers_while_somebody_who_was_seen_in_it_runs(
    stranger: subprocess.Popen[bytes],
) -> None:
    gone = subprocess.Popen(["sleep", "60"], start_new_session=True)
    sessions = WorkerSessions()
    sessions.begin("0", stranger.pid)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(leftovers, "processes_of_session", lambda session: [gone.pid])
        sessions.end("0", signalled=False)
    gone.kill()
    gone.wait()
    sessions.kill()
    assert stranger.poll() is None


def test_a_worker_whose_end_was_not_heard_of_yet_is_ended(stranger: subprocess.Popen[bytes]) -> None:
    sessions = WorkerSessions()
    sessions.begin("0", stranger.pid)
    sessions.kill()
    assert stranger.wait() == -signal.SIGKILL


def test_another_users_process_is_no_error(stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert signal_session(stranger.pid, signal.SIGTERM) == [stranger.pid]
    monkeypatch.undo()
