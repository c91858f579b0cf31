"""What a command finds at the etcd that it names: a job to join, none, one that is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import AgentRecord, CoordinatorUnavailable, JobCoordinator, JobNameTaken
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.command_line import CommandLine
from deepspeed_bamboo.elastic.errors import JobOverError, NotYetError
from deepspeed_bamboo.elastic.finding import find_running
from deepspeed_bamboo.elastic.refusing import how_refused
from deepspeed_bamboo.elastic.running_job import Patience, RunningJob, open_store
from tests.coordination.helpers import first_epoch

LINE = CommandLine("train.py", (), job="j")


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with PrivateEtcd() as server:
        yield str(server.endpoint)


@pytest.fixture
def job(etcd: str) -> Iterator[JobCoordinator]:
    """The job that commands name, with nothing in it."""
    with contextlib.closing(open_store([etcd], within_seconds=5)) as store:
        job = JobCoordinator(store, job="j")
        yield job
        job._delete_everything()


def find(*endpoints: str, line: CommandLine = LINE, **settings: Any) -> RunningJob | None:
    config = BambooConfig.model_validate({"coordinator": {"endpoints": list(endpoints), **settings}})
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as registered:
        return find_running(line, config, opened, registered, patience=Patience())


def test_a_job_that_is_complete_since_then_is_not_started_again(
    etcd: str, job: JobCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.finish({})
    job.clean_up_if_last()
    assert find(etcd) is None, "a bare command starts it"
    monkeypatch.setenv("BAMBOO_SINCE", "1")
    with pytest.raises(JobOverError, match="the job 'j' is complete since"):
        find(etcd)
    monkeypatch.setenv("BAMBOO_SINCE", "99999999999")
    assert find(etcd) is None


def test_who_may_not_start_the_job_comes_again(etcd: str, job: JobCoordinator) -> None:
    with pytest.raises(NotYetError, match="no job 'j' runs at"):
        find(etcd, line=CommandLine("train.py", (), job="j", join=True))


def test_a_job_that_ends_while_it_is_looked_at_is_not_missing_its_secret(
    etcd: str, job: JobCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = job.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
    job.propose(first_epoch(["w0"]), expected=None)

    def ends(coordinator: JobCoordinator) -> tuple[str, str]:
        agent.withdraw()
        job.clean_up_if_last()
        return "", ""

    monkeypatch.setattr(JobCoordinator, "salt_and_proof", ends)
    with pytest.raises(NotYetError, match="job 'j' has just ended"):
        find(etcd)


def test_a_job_that_begins_is_not_there_yet(etcd: str, job: JobCoordinator) -> None:
    with job.claim_name(lease_seconds=30), pytest.raises(JobNameTaken) as caught:
        find(etcd)
    assert how_refused(caught.value) == "not_yet"


def test_an_etcd_that_does_not_answer_is_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnavailable) as caught:
        find(f"unix:{tmp_path}/nobody:1", connect_timeout_seconds=0.3)
    assert how_refused(caught.value) == "not_yet"
