"""The rendezvous that torch's agents require. The launcher has decided everything: ranks never change here."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.slot import Slot


class LauncherRendezvous(RendezvousHandler):
    """The coordinator has the membership; this only repeats what the slot and rank 0's message say."""

    def __init__(self, slot: Slot, boot: Boot) -> None:
        self._slot = slot
        self._boot = boot

    def get_backend(self) -> str:
        return "bamboo"

    def next_rendezvous(self) -> RendezvousInfo:
        """The slot's rank, and where the workers of the first attempt meet. There is no agents' store."""
        no_store: Any = None
        meeting = RendezvousStoreInfo(self._boot.master_addr, self._boot.master_ports[0])
        return RendezvousInfo(no_store, self._slot.rank, self._slot.world_size, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Always 0: who joins is decided in the coordinator, and restarts nobody."""
        return 0

    def get_run_id(self) -> str:
        return self._boot.job

    def shutdown(self) -> bool:
        return True


def worker_spec(slot: Slot, boot: Boot) -> WorkerSpec:
    """What torch's agent wants to know; how workers are started is this agent's own affair."""
    return WorkerSpec(
        role="bamboo",
        local_world_size=1,
        rdzv_handler=LauncherRendezvous(slot, boot),
        entrypoint=sys.executable,
        max_restarts=0,
    )
