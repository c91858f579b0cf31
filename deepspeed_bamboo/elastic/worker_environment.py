"""What an agent puts into the environment of its worker."""

from __future__ import annotations

import os
from collections.abc import Collection

from deepspeed_bamboo import protocol
from deepspeed_bamboo.elastic.address import advertised_address, interfaces_of
from deepspeed_bamboo.elastic.agent_settings import AgentSettings
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.decisions import StartWorker
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.starting import quiet_grpc


def own_address(boot: Boot) -> str:
    """The address under which the others reach this machine."""
    return advertised_address(os.environ, master_addr=boot.master_addr, endpoints=boot.endpoints)


def meeting_port(boot: Boot, generation: int) -> int:
    """Where the workers of this generation meet as the job starts; later ones, which start anew, meet elsewhere."""
    return boot.master_ports[min(generation, len(boot.master_ports) - 1)]


def worker_environment(
    slot: Slot,
    boot: Boot,
    action: StartWorker,
    *,
    settings: AgentSettings,
    error_file: str,
    notice_signals: Collection[int],
) -> dict[str, str]:
    """Variables for the worker that ``action`` starts. ``notice_signals``: those that it is to ignore."""
    address, seat = own_address(boot), action.seat
    rank = slot.rank if seat is None else seat.index
    workers = max(slot.workers, slot.rank + 1) if seat is None else seat.workers
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(min(slot.local_world_size, slot.workers)),
        "MASTER_ADDR": boot.master_addr if seat is None else seat.address,
        "MASTER_PORT": str(meeting_port(boot, action.generation) if seat is None else seat.port),
        protocol.JOB: boot.job,
        protocol.ENDPOINTS: ",".join(boot.endpoints),
        protocol.PREFIX: boot.prefix,
        protocol.SECRET: boot.secret,
        protocol.WORKER: action.worker,
        protocol.GENERATION: str(action.generation),
        protocol.JOINING: "1" if action.joining else "",
        protocol.ADDRESS: address,
        protocol.NOTICE_SIGNALS: ",".join(str(int(number)) for number in sorted(notice_signals)),
        protocol.NODE: slot.node,
        protocol.ZONE: slot.zone,
        protocol.AGENT_PID: str(os.getpid()),
        protocol.ERROR_FILE: error_file,
        **interfaces_of(os.environ, address),
        **quiet_grpc(os.environ),
        **dict(settings.environment),
        **({} if seat is None else {protocol.PIPELINES: str(seat.pipelines), protocol.REACHED: str(seat.reached)}),
    }
