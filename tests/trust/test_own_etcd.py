"""A job's own etcd as another machine reaches it: encrypted, by those who know secret and certificate only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.elastic.boot import Boot, pack, unpack
from deepspeed_bamboo.elastic.own_etcd import reached, start_own_etcd
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.trust.certificate import own_certificate

SECRET = "s" * 64


@pytest.fixture(scope="module")
def boot() -> Iterator[Boot]:
    """What the first machine of several says of its etcd, as others get it."""
    with contextlib.ExitStack() as opened:
        _, endpoints, certificate = start_own_etcd(opened, own="127.0.0.1", alone=False, secret=SECRET)
        told = Boot("j", "/p", endpoints, "127.0.0.1", (1,), host_pid=1, secret=SECRET, certificate=certificate)
        yield unpack(pack(told))


@contextlib.contextmanager
def store_of(boot: Boot) -> Iterator[EtcdStore]:
    with contextlib.ExitStack() as opened:
        endpoints = [Endpoint.parse(text) for text in reached(boot, opened)]
        yield opened.enter_context(contextlib.closing(EtcdStore(endpoints, call_timeout_seconds=5)))


def test_another_machine_writes_reads_and_watches(boot: Boot) -> None:
    with store_of(boot) as one, store_of(boot) as other:
        kinds = {"resync": threading.Event(), "put": threading.Event()}
        watch = other.watch("/p/", lambda event: kinds[event.kind].set())
        assert kinds["resync"].wait(10), "what is written from here on is delivered"
        one.put("/p/a", "x" * 500_000)
        found = other.get("/p/a")
        assert found is not None and found.value == "x" * 500_000
        assert kinds["put"].wait(10)
        watch.stop()


def test_a_client_that_does_not_encrypt_gets_nothing(boot: Boot) -> None:
    plain = EtcdStore([Endpoint.parse(boot.endpoints[0])], call_timeout_seconds=0.5)
    with contextlib.closing(plain), pytest.raises(CoordinatorUnavailable):
        plain.get("/p/a")


def test_another_certificate_or_secret_is_refused(boot: Boot) -> None:
    for wrong in (replace(boot, certificate=own_certificate()[0]), replace(boot, secret="t" * 64)):
        with store_of(wrong) as store, pytest.raises(CoordinatorUnavailable):
            store.ping(within_seconds=0.5)


def test_without_a_certificate_nobody_connects_at_all(boot: Boot) -> None:
    with pytest.raises(MessageError, match="none"), store_of(replace(boot, certificate="")):
        pass


def test_a_job_on_one_machine_needs_none() -> None:
    with contextlib.ExitStack() as opened:
        server, endpoints, certificate = start_own_etcd(opened, own="127.0.0.1", alone=True, secret=SECRET)
        assert endpoints == (str(server.endpoint),) and server.endpoint.is_local and certificate == ""
