"""What an agent can't record does not keep it waiting for ever."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.coordination import AgentRecord, JobCoordinator, JobFailure, MemoryStore
from deepspeed_bamboo.elastic import messenger as module
from deepspeed_bamboo.elastic.decisions import Action, CheckSuspect, CoordinatorGone, Event, Finish, MarkEnded
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.messenger import Messenger
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
