"""Looking for a running job: when its etcd does not answer, and when it is just being started."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_bamboo.coordination import AgentRecord, JobCoordinator, JobFailure, JobNameTaken, MemoryStore
from deepspeed_bamboo.coordination.published import PublishedJob, own_pid_namespace, publish, published_jobs
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.running_job import Patience, can_be_joined, private_job
from tests.coordination.helpers import first_epoch, freeze


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishedJob]:
    """A job whose etcd was stopped by SIGSTOP."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with PrivateEtcd() as server:
        about = PublishedJob("still", "/deepspeed_bamboo", str(server.endpoint), os.getpid(), own_pid_namespace())
        publish(server.directory, about)
        freeze(server.pid)
        try:
            yield about
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_job_whose_etcd_is_silent_is_not_started_twice(silent: PublishedJob) -> None:
    assert published_jobs("still") == [silent]
    with (
        pytest.raises(JobNameTaken, match=r"'still' at .* has not answered for 0\.5 s, and process \d+.*--job NAME"),
        private_job("still", within_seconds=0.5),
    ):
        pass
    with private_job("other", within_seconds=0.5) as found:
        assert found is None


@pytest.mark.parametrize("left_behind", [lambda job: None, lambda job: job.propose(first_epoch(["w0"]), expected=None)])
def test_a_job_whose_name_was_just_claimed_is_being_started(left_behind: Callable[[JobCoordinator], object]) -> None:
    store = MemoryStore()
    job, starting = JobCoordinator(store, job="j"), JobCoordinator(store, job="j")
    left_behind(JobCoordinator(store, job="j"))
    assert not can_be_joined(job)
    with starting.claim_name(lease_seconds=30):
        left_behind(JobCoordinator(store, job="j"))
        with pytest.raises(JobNameTaken, match=r"'j' is just starting .* start this command again in a moment"):
            can_be_joined(job)
    assert not can_be_joined(job)
    store.close()


def test_who_waits_for_a_job_joins_it_once_it_trains() -> None:
    store = MemoryStore()
    job, starting = JobCoordinator(store, job="j"), JobCoordinator(store, job="j")
    told: list[str] = []

    def goes_on(text: str) -> None:
        told.append(text)
        starting.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
        starting.propose(first_epoch(["w0"]), expected=None)

    with starting.claim_name(lease_seconds=30):
        assert can_be_joined(job, Patience(seconds=20, tell=goes_on))
    assert told == ["job 'j' is just starting; this command joins it when it trains"]
    store.close()


@pytest.mark.parametrize("how", ["stop", "finish", "fail"])
def test_a_job_that_is_about_to_end_is_waited_for_by_a_command_that_is_repeated(how: str) -> None:
    store = MemoryStore()
    job, other = JobCoordinator(store, job="j"), JobCoordinator(store, job="j")
    agent = other.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
    other.propose(first_epoch(["w0"]), expected=None)
    if how == "stop":
        other.request_stop("enough")
    elif how == "finish":
        other.finish({})
    else:
        other.fail(JobFailure(worker="w0", kind="fatal_loss", message="gone", traceback=""))
    told: list[str] = []

    def ends(text: str) -> None:
        told.append(text)
        agent.withdraw()
        other.clean_up_if_last()

    with pytest.raises(JobNameTaken, match="about to end; start this command again in a moment"):
        can_be_joined(job, Patience(seconds=20))
    assert not can_be_joined(job, Patience(seconds=20, tell=ends, through_end=True))
    assert told == ["job 'j' is about to end; this command waits until it has"]
    end = job.last_end()
    assert (end.state if end else None) == {"stop": None, "finish": "finished", "fail": "failed"}[how]
    store.close()
