"""What a process that was cut off brings back: nothing into another run of its job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepspeed_bamboo.coordination import AgentRecord, AnotherRun, CoordinatorUnavailable, MemoryStore, Registration
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.records import JobFailure
from deepspeed_bamboo.coordination.store import KeyValueStore
from tests.coordination.helpers import first_epoch, member, unique_name, wait_until


@contextmanager
def _run_of(job: JobCoordinator, *, slots: int = 2) -> Iterator[None]:
    with job.claim_name(lease_seconds=60):
        job.record_start(slots=slots)
        yield


def _old_run(open_store: Callable[[], KeyValueStore]) -> tuple[str, JobCoordinator, JobCoordinator]:
    """A job's name, and two who are in its third epoch."""
    name = unique_name()
    a, b = JobCoordinator(open_store(), job=name), JobCoordinator(open_store(), job=name)
    with _run_of(a):
        record = first_epoch(["A-0-0", "B-1-0"])
    a.propose(record, expected=None)
    for number in (1, 2):
        assert a.propose(replace(record, number=number), expected=number - 1)
    epoch = b.epoch()
    assert epoch is not None and epoch.number == 2
    return name, a, b


def test_an_old_run_is_not_put_into_the_next_one(open_store: Callable[[], KeyValueStore]) -> None:
    name, a, b = _old_run(open_store)
    a.fail(JobFailure("A-0-0", "fatal_loss", "x", ""))
    a.clean_up()
    with pytest.raises(AnotherRun, match="has ended, and this process had not heard of it"):
        b.epoch()
    new = JobCoordinator(open_store(), job=name, generation=0)
    with _run_of(new):
        with pytest.raises(AnotherRun):
            b.epoch()  # while the new run is just starting
        assert new.epoch() is None
    started = first_epoch(["A-0-0", "C-1-0"])
    assert new.propose(started, expected=None)
    with pytest.raises(AnotherRun, match="started anew without this process"):
        b.epoch()
    for late in (
        lambda: b.propose_loss(["A-0-0"], reason="x", proposer="b"),
        lambda: b.fail(JobFailure("B-1-0", "user_error", "x", "")),
        lambda: b.finish({"reason": "x"}),
        lambda: b.mark_ended("B-1-0", {}),
        lambda: b.register(member("B-1-0", rank=1), lease_seconds=5),
        lambda: b.register_agent(AgentRecord(1, "b", 1), lease_seconds=5),
    ):
        with pytest.raises(AnotherRun):
            late()
    assert new.epoch() == started and new.failure() is None and new.finished() is None
    assert not new.ended() and not new.members() and not new.agents()


def test_within_a_start_of_that_name_nothing_is_put_back() -> None:
    store, name = MemoryStore(), unique_name()
    keys = JobKeys(prefix="/deepspeed_bamboo", job=name)
    job = JobCoordinator(store, job=name)
    job.propose(first_epoch(["w0", "w1"]), expected=None)
    store.delete(keys.epoch)
    store.put(keys.claim, name)
    with pytest.raises(CoordinatorUnavailable, match="is being started"):
        job.epoch()
    assert store.get(keys.epoch) is None
    store.delete(keys.claim)
    epoch = job.epoch()
    assert epoch is not None and store.get(keys.epoch) is not None
    store.close()


def test_an_agent_and_a_worker_of_an_old_run_do_not_register_again(open_store: Callable[[], KeyValueStore]) -> None:
    name, a, b = _old_run(open_store)
    store = open_store()
    agent = b.register_agent(AgentRecord(1, "b", 1), lease_seconds=1)
    worker = b.register(member("B-1-0", rank=1), lease_seconds=1)
    entry = store.get(JobKeys(prefix="/deepspeed_bamboo", job=name).member("B-1-0"))
    assert entry is not None
    a.fail(JobFailure("A-0-0", "fatal_loss", "x", ""))
    a.clean_up()
    for lease in (agent._lease, json.loads(entry.value)["lease"]):
        store.revoke(lease)  # as it ends while a machine is cut off
    wait_until(lambda: agent.displaced is not None, what="the agent's news")
    assert "has ended" in (agent.displaced or "") and worker.lost.wait(5)
    new = JobCoordinator(open_store(), job=name)
    assert not new.agents() and not new.members() and new.peek_epoch() is None


def test_a_time_in_which_nobody_asked_the_store_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP and SIGCONT: the clock has gone on, and the store was not asked."""
    store = MemoryStore()
    registration = Registration(store, key="/a", value="{}", lease_seconds=0.6)
    now = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: now() + 900)
    monkeypatch.setattr("deepspeed_bamboo.coordination.registration.time", clock)
    assert registration.cut_off_for_seconds() == 0
    store.set_available(False)
    wait_until(lambda: registration.cut_off_for_seconds() > 0, what="a failed renewal")
    assert registration.cut_off_for_seconds() < 60
    store.set_available(True)
    wait_until(lambda: registration.cut_off_for_seconds() == 0, what="an answer")
    registration.withdraw()
    store.close()
