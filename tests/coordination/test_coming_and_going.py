"""Nodes that are to be left, jobs that are to end, and workers that join, over both stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from deepspeed_bamboo.coordination.errors import EndpointError
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import AgentRecord, Member
from deepspeed_bamboo.coordination.store import KeyValueStore
from tests.coordination.helpers import first_epoch, member, unique_name, wait_until

OpenJob = Callable[[], JobCoordinator]
WORKERS = ["w0", "w1"]


@pytest.fixture
def open_job(open_store: Callable[[], KeyValueStore]) -> OpenJob:
    name = unique_name()
    return lambda: JobCoordinator(open_store(), job=name)


def test_a_node_drains_until_that_is_taken_back(open_job: OpenJob) -> None:
    job, other = open_job(), open_job()
    assert other.draining() == {}
    before = time.time()
    job.request_drain("n1", deadline_seconds=120.0, reason="EC2 takes it")
    job.request_drain("n2", deadline_seconds=None, reason="somebody asked")
    drains = other.draining()
    assert {node: (d.node, d.deadline_seconds, d.reason) for node, d in drains.items()} == {
        "n1": ("n1", 120.0, "EC2 takes it"),
        "n2": ("n2", None, "somebody asked"),
    }
    assert before <= drains["n1"].time_seconds <= time.time()
    other.cancel_drain("n1")
    other.cancel_drain("n1")
    assert set(job.draining()) == {"n2"}


def test_of_two_requests_the_later_counts_but_a_deadline_stays(open_job: OpenJob) -> None:
    job = open_job()
    job.request_drain("n", deadline_seconds=None, reason="rebalance")
    job.request_drain("n", deadline_seconds=120.0, reason="interruption")
    assert job.draining()["n"].deadline_seconds == 120.0
    job.request_drain("n", deadline_seconds=None, reason="rebalance again")
    assert job.draining()["n"].reason == "interruption"
    job.request_drain("n", deadline_seconds=5.0, reason="sooner")
    assert job.draining()["n"].deadline_seconds == 5.0


@pytest.mark.parametrize("node", ["", "a/b", "a b"])
def test_a_node_that_cannot_be_one_is_refused(node: str) -> None:
    store = MemoryStore()
    with pytest.raises(EndpointError, match="node name"):
        JobCoordinator(store, job="j").request_drain(node, deadline_seconds=None, reason="r")
    store.close()


def test_the_first_reason_to_stop_stands(open_job: OpenJob) -> None:
    job, other = open_job(), open_job()
    assert other.stop_requested() is None
    job.request_stop("enough")
    other.request_stop("too much")
    assert other.stop_requested() == "enough"


def test_ranks_are_given_once_however_many_ask(open_job: OpenJob) -> None:
    jobs = [open_job() for _ in range(6)]
    jobs[0].reserve_ranks(4)
    jobs[1].reserve_ranks(9)
    together = threading.Barrier(len(jobs))
    given: list[int] = []

    def ask(job: JobCoordinator) -> None:
        together.wait()
        given.extend(job.next_rank() for _ in range(3))

    threads = [threading.Thread(target=ask, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(4, 4 + 18))


def test_ranks_after_the_store_lost_its_data_are_not_those_of_the_living(open_job: OpenJob) -> None:
    job = open_job()
    agent = job.register_agent(AgentRecord(rank=3, node="n", pid=1), lease_seconds=5)
    worker = job.register(member("w", rank=7), lease_seconds=5)
    assert [job.next_rank(), job.next_rank()] == [8, 9]
    agent.withdraw()
    worker.withdraw()


def test_a_new_job_of_the_name_inherits_neither_drains_nor_stop_nor_ranks(open_job: OpenJob) -> None:
    job = open_job()
    job.reserve_ranks(4)
    job.request_drain("n", deadline_seconds=1.0, reason="r")
    job.request_stop("r")
    with job.claim_name(lease_seconds=10):
        assert job.draining() == {} and job.stop_requested() is None
        job.reserve_ranks(2)
        assert job.next_rank() == 2


def test_a_member_of_an_older_version_is_not_joining() -> None:
    value = member("w").to_json()
    del value["joining"]
    assert Member.from_json(value) == member("w")


def test_a_joiner_stays_until_it_was_a_member_and_is_one_no_more() -> None:
    """In memory only: what decides is not the store's business."""
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    job.propose(first_epoch(WORKERS), expected=None)
    joiner = job.register(replace(member("w9"), joining=True), lease_seconds=0.2)
    store.revoke(1)  # as an outage longer than the lease would
    wait_until(lambda: "w9" in job.members() and job.members()["w9"].joining, what="its return")
    assert not joiner.lost.wait(0.5)
    job.propose(replace(first_epoch([*WORKERS, "w9"]), number=1), expected=0)
    wait_until(lambda: not joiner.lost.wait(0.3), what="a renewal or two as a member")
    job.propose_loss(["w9"], reason="cut off", proposer="agent")
    assert joiner.lost.wait(5)
    assert "w9" not in job.members()
    store.close()
