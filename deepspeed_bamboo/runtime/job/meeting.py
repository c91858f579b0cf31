"""Where torch's own process groups meet: at a store that asks for the job secret, on the job's own address only.

torch's TCPStore listens on every interface and answers anybody. Scripts make their first process group with it
(``init_process_group``, ``deepspeed.init_distributed``), so inside :func:`guarded_meetings` another store takes
its place. Gloo's groups are made as usual, and then their members prove that they belong to the job.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from deepspeed.utils import logger

from deepspeed_bamboo.protocol import ADDRESS, SECRET
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.guarded_store import StoreClient
from deepspeed_bamboo.runtime.comm.proved_mesh import ProvingGloo
from deepspeed_bamboo.runtime.comm.store_server import StoreServer

_MAKER = "_create_c10d_store"
_GLOO = "ProcessGroupGloo"


@contextmanager
def guarded_meetings(environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, process groups of ``env://`` and ``tcp://`` meet at a guarded store; without a job secret at torch's."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of that name hides the module
    stock = getattr(rendezvous, _MAKER, None)
    if not environment.get(SECRET):
        yield
        return
    if stock is None:
        logger.warning(
            f"this torch has no {_MAKER}: its own process groups listen on all interfaces while a job starts"
        )
        yield
        return
    meetings = _Meetings(environment[SECRET], address=environment.get(ADDRESS) or "127.0.0.1")
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    gloo = getattr(groups, _GLOO)
    setattr(rendezvous, _MAKER, meetings.store)
    setattr(groups, _GLOO, ProvingGloo(gloo, secret=environment[SECRET]))
    try:
        yield
    finally:
        setattr(rendezvous, _MAKER, stock)
        setattr(groups, _GLOO, gloo)


class _Meetings:
    """Stands for torch's function that makes the store of a rendezvous."""

    def __init__(self, secret: str, *, address: str) -> None:
        self._secret, self._address = secret, address
        self._servers: dict[int, StoreServer] = {}
        # torch holds on to what it uses of them, but not to the Python objects.
        self._clients: list[StoreClient] = []

    def store(
        self, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        """Called as torch's own. Each meeting of a process finds an empty store: all ranks make the same calls."""
        if rank == 0 and port not in self._servers:
            self._servers[port] = StoreServer(self._address, port, secret=self._secret)
        host = self._address if rank == 0 else hostname
        client = StoreClient(host, port, secret=self._secret, timeout=timeout, insist=True)
        self._clients.append(client)
        return c10d.PrefixStore(f"meeting {len(self._clients)}", client)
