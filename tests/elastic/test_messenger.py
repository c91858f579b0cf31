"""What an agent can't record does not keep it waiting for ever."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.coordination import AgentRecord, JobCoordinator, MemoryStore
from deepspeed_bamboo.elastic import messenger as module
from deepspeed_bamboo.elastic.decisions import Action, CoordinatorGone, Event, Finish, MarkEnded
from deepspeed_bamboo.elastic.mailbox import Mailbox
from deepspeed_bamboo.elastic.messenger import Messenger
from deepspeed_bamboo.elastic.slot import Slot

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
