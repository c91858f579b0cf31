"""A job from before its start to its end, over jobs as they write themselves, in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from deepspeed_bamboo.cli.followed_job import FollowedJob, lasts
from deepspeed_bamboo.cli.job import NoSuchJobError, NoUserError, SeveralJobsError, is_there
from deepspeed_bamboo.cli.job_view import JobView, look
from deepspeed_bamboo.coordination import DEFAULT_PREFIX, running_jobs
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, EndpointError
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import FINAL_FAILURES, AgentRecord, EndedJob, FailureKind, JobFailure
from deepspeed_bamboo.elastic.judging import judge
from deepspeed_bamboo.elastic.outcome import SlotNote
from deepspeed_bamboo.elastic.rules import exit_code
from deepspeed_bamboo.errors import BambooError, ConfigError
from tests.coordination.helpers import first_epoch, member


class Jobs:
    """A store, jobs that run there, and what follows them."""

    def __init__(self, name: str | None = None) -> None:
        self.store = MemoryStore()
        self.followed = FollowedJob(self._view, lambda job: self.job(job).last_end(), name=name)
        self._live: list[object] = []

    def job(self, name: str = "gpt") -> JobCoordinator:
        return JobCoordinator(self.store, job=name)

    def start(self, name: str = "gpt") -> JobCoordinator:
        """As the first machine does it, with an agent on each of two nodes."""
        job = self.job(name)
        with job.claim_name(lease_seconds=60):
            self._live = [job.register_agent(AgentRecord(rank, f"n{rank}", 1), lease_seconds=60) for rank in (0, 1)]
        job.propose(first_epoch(["a", "b"]), expected=None)
        return job

    def leave(self) -> None:
        """All machines are gone."""
        for registration in self._live:
            registration.withdraw()  # type: ignore[attr-defined]
        self._live = []

    def _view(self, name: str | None) -> JobView:
        if name is None:
            there = running_jobs(self.store)
            if len(there) > 1:
                raise SeveralJobsError(f"several jobs run: {there}")
            name = there[0] if there else "none"
        if not is_there(self.job(name)):
            raise NoSuchJobError(f"no job {name!r}")
        return look(self.job(name))


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    yield Jobs()


def test_the_job_that_is_seen_first_is_followed_by_its_name(jobs: Jobs) -> None:
    assert jobs.followed.look().line == "there is no job yet: no job 'none'"
    jobs.start("gpt")
    assert jobs.followed.look().view is not None
    jobs.start("other")
    found = jobs.followed.look()
    assert found.view is not None and found.view.job == "gpt" and not found.over


def test_a_job_of_no_name_among_several_is_refused(jobs: Jobs) -> None:
    jobs.start("gpt")
    jobs.start("other")
    with pytest.raises(SeveralJobsError):
        jobs.followed.look()


@pytest.mark.parametrize("cleaned", [True, False])
def test_a_job_that_is_complete_is_over(jobs: Jobs, cleaned: bool) -> None:
    job = jobs.start()
    assert not jobs.followed.look().over
    job.finish({"step": 9})
    jobs.leave()
    if cleaned:
        job.clean_up()
    found = jobs.followed.look()
    assert found.over and found.line == "job gpt is finished"


def test_a_job_that_is_complete_is_over_when_its_machines_have_left_it(jobs: Jobs) -> None:
    job = jobs.start()
    job.finish({"step": 9})
    for _ in range(2):  # also for one who comes at this moment
        found = jobs.followed.look()
        assert not found.over and found.line == "job gpt is finished; its machines are about to leave it"
    jobs.leave()
    job.clean_up()
    assert not Jobs("gpt").followed.look().over


def test_an_end_that_a_restored_etcd_has_is_no_end() -> None:
    jobs = Jobs("gpt")
    job = jobs.start()
    job.finish({"step": 9})
    jobs.leave()
    job.clean_up()
    (old,) = jobs.store.read(JobKeys(prefix=DEFAULT_PREFIX, job="gpt").last_end).entries
    jobs.followed.look()
    jobs.start()
    assert jobs.followed.look().view is not None
    jobs.leave()
    job.clean_up()
    jobs.store.put(old.key, old.value)
    found = jobs.followed.look()
    assert not found.over and "how it ended is not known" in found.line


@pytest.mark.parametrize("cleaned", [True, False])
@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_failed_job_is_over_where_nobody_repeats_its_command(jobs: Jobs, kind: FailureKind, cleaned: bool) -> None:
    job = jobs.start()
    jobs.followed.look()
    job.fail(JobFailure("w0", kind, "why", ""))
    jobs.leave()
    if cleaned:
        job.clean_up()
    found = jobs.followed.look()
    code = exit_code(kind, if_interrupted=None)
    again = judge(code, [SlotNote(kind, code, 3, "why")]).kind == "again"
    assert found.over == (kind in FINAL_FAILURES) == (not again)
    away = "job gpt is run by nobody that etcd knows of: why; it is not over, so its fleet stays"
    assert found.line == (away if again else "job gpt is failed: why")
    if again:
        jobs.start()
        assert jobs.followed.look().view is not None


def test_a_job_without_machines_and_without_a_known_end_may_continue(jobs: Jobs) -> None:
    job = jobs.start()
    jobs.followed.look()
    jobs.leave()
    found = jobs.followed.look()
    assert not found.over and "etcd knows of: nobody runs it any more" in found.line
    job.clean_up()
    found = jobs.followed.look()
    assert not found.over and "how it ended is not known" in found.line


@pytest.mark.parametrize("end", ["finished", "failed", "dead", "cleaned"])
def test_what_an_earlier_job_of_that_name_left_is_no_end(end: str) -> None:
    jobs = Jobs("gpt")
    job = jobs.start()
    if end == "failed":
        job.fail(JobFailure("w0", "user_error", "why", ""))
    elif end != "dead":
        job.finish({"step": 9})
    jobs.leave()
    if end == "cleaned":
        job.clean_up()
    for _ in range(2):
        found = jobs.followed.look()
        assert not found.over and found.line.startswith("there is no job yet: ") and " earlier " in found.line
    jobs.start().finish({"step": 12})
    jobs.leave()
    job.clean_up()
    assert jobs.followed.look().over  # also if nobody has looked while it ran


def test_how_a_job_failed_is_kept_and_was_not_by_older_versions(jobs: Jobs) -> None:
    job = jobs.start()
    job.fail(JobFailure("w0", "fatal_loss", "why", ""))
    jobs.leave()
    job.clean_up()
    end = job.last_end()
    assert end is not None and (end.failure, end.final) == ("fatal_loss", False)
    assert replace(end, failure="user_error").final and replace(end, state="stopped", failure="").final
    older = {name: value for name, value in json.loads(json.dumps(end.to_json())).items() if name != "failure"}
    assert not EndedJob.from_json(older).final


def test_a_view_counts_the_slots_of_each_node_and_those_without_a_worker() -> None:
    job = Jobs().job()
    for rank, node in enumerate(["a", "a", "b"]):
        job.register_agent(AgentRecord(rank, node, 1), lease_seconds=60)
    job.register(replace(member("w3", rank=3), node="c"), lease_seconds=60)
    assert look(job).slots_of == {"a": 2, "b": 1, "c": 1}


def test_what_another_look_does_not_mend() -> None:
    def unavailable(reason: str) -> BambooError:
        return CoordinatorUnavailable(endpoints=["etcd:2379"], tried_seconds=5.0, reason=reason)

    lasting = [ConfigError("x"), EndpointError("x"), NoUserError("x"), SeveralJobsError("x")]
    assert all(map(lasts, [*lasting, unavailable("authentication failed")]))
    assert not any(map(lasts, [unavailable("timed out"), NoSuchJobError("x"), BambooError("x")]))
