"""What an agent can't record does not keep it waiting for ever."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepspeed_bamboo.coordination import AgentRecord, JobCoordinator, JobFailure, MemoryStore, job_news
from deepspeed_bamboo.elastic import messenger as module
from deepspeed_bamboo.elastic.decisions import (
    Action,
    CheckSuspect,
    CoordinatorGone,
    Event,
    Finish,
    ForgetDrain,
    MarkEnded,
)
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.messenger import Messenger, forget_past_drain
from deepspeed_bamboo.elastic.slot import Slot
from tests.coordination.helpers import first_epoch, member

SLOT = Slot(
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    node="n",
    zone="z",
    master_addr="127.0.0.1",
    master_port=1,
    start_workers=None,
)


@pytest.mark.parametrize("action", [MarkEnded("w0", 0), Finish("all have ended")])
def test_an_end_that_can_not_be_recorded_ends_the_agent(action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENDED_SECONDS", 0.2)
    store, mailbox = MemoryStore(), Mailbox()
    job = JobCoordinator(store, job="j")
    registration = job.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
    messenger = Messenger(job, SLOT, registration, mailbox, lease_seconds=30)
    store.set_available(False)
    messenger.send(action)

    def gone(event: Event | None) -> bool:
        return isinstance(event, CoordinatorGone) and "could not be recorded" in event.reason

    assert mailbox.wait_until(gone, within_seconds=10)
    messenger.stop(within_seconds=5)
    store.close()


@pytest.mark.parametrize("judged", ["failed", "finished", "ended", ""])
def test_a_worker_whose_agent_has_judged_and_left_is_not_called_lost(judged: str) -> None:
    """The news of the judgement may come after a survivor's suspicion, and after the agent's own end."""
    mailbox, store = Mailbox(), MemoryStore()
    job = JobCoordinator(store, job="j")
    registration = job.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
    job.register(member("w-1-0", rank=1), lease_seconds=30)  # nobody listens at its port, and it has no agent
    job.propose(first_epoch(["w-0-0", "w-1-0"]), expected=None)
    if judged == "failed":
        job.fail(JobFailure(worker="w-1-0", kind="exit", message="exit code 7", traceback=""))
    elif judged == "finished":
        job.finish({"reason": "all have ended"})
    elif judged == "ended":
        job.mark_ended("w-1-0", {"generation": 0})
    messenger = Messenger(job, SLOT, registration, mailbox, lease_seconds=30)
    messenger.send(CheckSuspect("w-1-0", "connection reset"))
    messenger.stop(within_seconds=20)
    epoch = job.epoch()
    assert epoch is not None and epoch.number == (0 if judged else 1)
    store.close()


@pytest.mark.parametrize(
    "deadline_seconds, age_seconds, stays", [(30.0, 60.0, False), (30.0, 5.0, True), (None, 60.0, True)]
)
def test_a_drain_that_was_not_carried_out_in_time_is_none_for_who_comes_later(
    deadline_seconds: float | None, age_seconds: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    job.register(replace(member("w-1-0", rank=1), node="n"), lease_seconds=30)
    job.propose(first_epoch(["w-0-0", "w-1-0"]), expected=None)
    with monkeypatch.context() as earlier:
        earlier.setattr(job_news, "time", SimpleNamespace(time=lambda: time.time() - age_seconds))
        job.request_drain("n", deadline_seconds=deadline_seconds, reason="the machine is being preempted")
    forget_past_drain(job, "n")
    assert "n" in job.draining()  # the job still has a worker there
    job.propose_loss(["w-1-0"], reason="silent", proposer="a")  # its key may still be there
    forget_past_drain(job, "n")
    assert ("n" in job.draining()) == stays
    store.close()


def test_the_key_of_a_lost_worker_does_not_keep_its_nodes_drain() -> None:
    store, mailbox = MemoryStore(), Mailbox()
    job = JobCoordinator(store, job="j")
    registration = job.register_agent(AgentRecord(rank=0, node="n", pid=1), lease_seconds=30)
    messenger = Messenger(job, SLOT, registration, mailbox, lease_seconds=30)
    job.register(replace(member("w-1-0", rank=1), node="n"), lease_seconds=30)
    job.propose(first_epoch(["w-0-0", "w-1-0"]), expected=None)
    job.request_drain("n", deadline_seconds=30.0, reason="x")
    job.propose_loss(["w-1-0"], reason="silent", proposer="a")
    messenger.send(ForgetDrain("n"))
    messenger.stop(within_seconds=20)
    assert "n" not in job.draining()
    store.close()
