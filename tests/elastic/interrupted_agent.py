"""An agent that gets SIGTERM while it starts its worker, when torch's handlers are in place instead of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import PContext, SignalException

from deepspeed_bamboo.coordination import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.elastic.agent import BambooElasticAgent
from deepspeed_bamboo.elastic.agent_settings import AgentSettings
from deepspeed_bamboo.elastic.boot import Boot
from tests.elastic.test_supervisor import SLOT


class Interrupted:
    """As CommandStarter is when the signal comes after its worker was started."""

    def start(self, environment: Mapping[str, str]) -> PContext:
        raise SignalException(f"process {os.getpid()} got SIGTERM", sigval=signal.SIGTERM)


def main() -> int:
    """The agent's exit code."""
    slot = replace(SLOT, rank=0, local_rank=0, world_size=1, local_world_size=1)
    store = MemoryStore()
    agent = BambooElasticAgent(
        slot,
        Boot(job="interrupted", prefix="/test", endpoints=("nowhere:1",), master_addr="127.0.0.1", master_ports=(1,)),
        coordinator=JobCoordinator(store, job="interrupted", prefix="/test"),
        starter=Interrupted(),
        settings=AgentSettings(lease_seconds=3.0),
    )
    agent.run()
    store.close()
    return agent.exit_code
