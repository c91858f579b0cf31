"""Stores to run the same tests over, and something to wait with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.coordination.store import KeyValueStore


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[PrivateEtcd]:
    """A real etcd for all tests that leave it running; they use prefixes of their own."""
    with PrivateEtcd() as server:
        yield server


@pytest.fixture(params=["memory", "etcd"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[[], KeyValueStore]]:
    """A function that opens the store anew: another client of one etcd, or the one store in memory."""
    opened: list[KeyValueStore] = []
    if request.param == "memory":
        memory = MemoryStore()

        def open_one() -> KeyValueStore:
            opened.append(memory)
            return memory

    else:
        server: PrivateEtcd = request.getfixturevalue("etcd_server")

        def open_one() -> KeyValueStore:
            opened.append(EtcdStore([server.endpoint]))
            return opened[-1]

    yield open_one
    for store in opened:
        store.close()
