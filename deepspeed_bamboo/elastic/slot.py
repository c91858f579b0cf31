"""One slot of a launcher: which worker of how many it is, and where."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.protocol import NODE, ZONE

_LAST_PORT = 65535


@dataclass(frozen=True)
class Slot:
    """What the launcher tells each process that it starts.

    ``master_addr`` and ``master_port`` are the launcher's; the job's own workers get a port of their
    own (see ``boot.py``). ``passed_local_rank``: whether the launcher passed ``--local_rank`` on the
    command line, which the script then expects too. ``start_workers``: how many slots form the job at its
    start; None for all. A slot that joins a job has a rank of that job, which its launcher doesn't know.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    zone: str
    master_addr: str
    master_port: int
    passed_local_rank: bool = False
    start_workers: int | None = None

    @property
    def workers(self) -> int:
        """How many workers the job starts with, for a slot of the command that starts it."""
        return self.world_size if self.start_workers is None else self.start_workers

    @property
    def one_machine(self) -> bool:
        """Whether all slots of the job have the same launcher."""
        return self.local_world_size >= self.world_size

    def worker(self, *, generation: int, attempt: int = 0) -> str:
        """The id of this slot's worker in a generation; ``attempt``: how many it has replaced since."""
        return f"{self.node}-{self.rank}-{generation}" + (f".{attempt}" if attempt else "")


def slot_from_environment(environment: Mapping[str, str], *, local_rank: int | None = None, zone: str = "auto") -> Slot:
    """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE (or LOCAL_WORLD_SIZE), MASTER_ADDR, MASTER_PORT.

    Without a launcher, hence without RANK, this is the only slot of a job of one worker. ``local_rank``
    is what the command line said. ``zone`` is the setting ``topology.zones``: ``auto`` takes
    BAMBOO_ZONE, else ``unknown``. Raises LaunchError for a variable that is no number, or missing.
    """
    if "RANK" not in environment:
        rank, world_size, local_world_size = 0, 1, 1
    else:
        rank = _number(environment, "RANK")
        world_size = _number(environment, "WORLD_SIZE")
        name = "LOCAL_SIZE" if "LOCAL_SIZE" in environment else "LOCAL_WORLD_SIZE"
        local_world_size = _number(environment, name) if name in environment else 1
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE is {world_size}; a rank is less than the world size")
    fallback = local_rank if local_rank is not None else rank
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else 29500
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = port - 1 if port == _LAST_PORT else port + 1  # torchrun serves its own store at the other
    return Slot(
        rank=rank,
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else fallback,
        world_size=world_size,
        local_world_size=local_world_size,
        node=key_part(environment.get(NODE) or socket.gethostname()),
        zone=(environment.get(ZONE) or "unknown") if zone == "auto" else zone,
        master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        passed_local_rank=local_rank is not None,
    )


def generation_of(worker: str) -> int:
    """The generation in a worker's id."""
    return int(worker.rpartition("-")[2].partition(".")[0])


def rank_of(worker: str) -> int:
    """The slot's rank in a worker's id."""
    return int(worker.rpartition("-")[0].rpartition("-")[2])


def key_part(text: str) -> str:
    """``text`` with everything that cannot be part of a key replaced, at most 64 characters."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return cleaned[:64] or "unnamed"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise LaunchError(
            f"the environment has RANK but not {name}; start with: deepspeed --module deepspeed_bamboo.launch SCRIPT"
        )
    if not text.strip().isdigit():
        raise LaunchError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)
