"""etcd killed, frozen, emptied, unreachable: calls end in time, watches and registrations come back."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from deepspeed_bamboo.coordination import etcd_watch
from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, LeaseExpired
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.etcd_connection import EtcdConnection
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import Change
from deepspeed_bamboo.coordination.server import free_port, free_ports
from deepspeed_bamboo.coordination.store import StoreEvent
from tests.coordination.helpers import Collector, first_epoch, member, stretched, wait_until
from tests.coordination.manual_etcd import ManualEtcd

WORKERS = ["w0", "w1", "w2", "w3"]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[ManualEtcd]:
    server = ManualEtcd(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def store(etcd: ManualEtcd) -> Iterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint], call_timeout_seconds=5)
    yield store
    store.close()


def test_an_unreachable_endpoint_is_named_with_how_long_it_was_tried() -> None:
    nobody = Endpoint("127.0.0.1", free_port("127.0.0.1"))
    store = EtcdStore([nobody])
    start = time.monotonic()
    with pytest.raises(CoordinatorUnavailable) as raised:
        store.ping(within_seconds=0.7)
    assert 0.6 < time.monotonic() - start < stretched(1.5)
    assert f"127.0.0.1:{nobody.port} gave no answer within 0." in str(raised.value)
    assert "refused" in str(raised.value) and "coordinator.endpoints" in str(raised.value)
    store.close()


def test_an_unknown_host_is_reported_in_time() -> None:
    store = EtcdStore([Endpoint("no-such-host.invalid", 2379)])
    with pytest.raises(CoordinatorUnavailable, match=r"no-such-host\.invalid:2379"):
        store.ping(within_seconds=1)
    store.close()


def test_a_server_that_accepts_and_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = EtcdStore([Endpoint("127.0.0.1", silent.getsockname()[1])], call_timeout_seconds=1)
        start = time.monotonic()
        with pytest.raises(CoordinatorUnavailable):
            store.get("/a")
        assert time.monotonic() - start < stretched(2)
        store.close()


def test_a_server_of_something_else_is_called_that() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = EtcdStore([Endpoint("127.0.0.1", server.server_address[1])])
        with pytest.raises(CoordinatorUnavailable, match="something answers at .* that is no etcd"):
            store.ping(within_seconds=1)
        store.close()
        server.shutdown()
    answer = "UNIMPLEMENTED: Received http2 header with status: 404"
    told = CoordinatorUnavailable(endpoints=["a:80"], tried_seconds=0.0, reason=answer)
    assert str(told).startswith("something answers at a:80 that is no etcd")


def test_calls_go_to_another_endpoint_when_one_fails(etcd: ManualEtcd) -> None:
    nobody = Endpoint("127.0.0.1", free_port("127.0.0.1"))
    store = EtcdStore([nobody, etcd.endpoint])
    told: Collector[StoreEvent] = Collector()
    store.watch("/x/", told)
    start = time.monotonic()
    store.put("/x/a", "1")
    assert time.monotonic() - start < stretched(1)
    told.wait_for(lambda event: event.kind in ("put", "resync"))
    store.put("/x/b", "2")
    told.wait_for(lambda event: event.value == "2")
    store.close()


def test_a_call_made_during_a_restart_succeeds_after_it(etcd: ManualEtcd, store: EtcdStore) -> None:
    store.put("/x/a", "before")
    etcd.kill()
    restart = threading.Thread(target=etcd.start)
    restart.start()
    entry = store.get("/x/a")
    restart.join()
    assert entry is not None and entry.value == "before"


def test_calls_during_a_long_outage_end_in_time(etcd: ManualEtcd) -> None:
    store = EtcdStore([etcd.endpoint], call_timeout_seconds=1, attempt_timeout_seconds=0.4)
    store.put("/x/a", "1")
    for fail in (etcd.freeze, etcd.kill):
        fail()
        start = time.monotonic()
        with pytest.raises(CoordinatorUnavailable):
            store.put("/x/a", "2")
        assert 0.9 < time.monotonic() - start < stretched(2)
    etcd.start()
    store.put("/x/a", "3")
    store.close()


def test_a_full_database_is_called_that(tmp_path: Path) -> None:
    # The quota is held against what is committed: that is so after every put, not every 100 ms.
    full = ManualEtcd(tmp_path, options=["--quota-backend-bytes=100000", "--backend-batch-limit=1"])
    full.start()
    store = EtcdStore([full.endpoint])
    with pytest.raises(CoordinatorUnavailable, match="has reached its quota .* `etcdctl alarm disarm`"):
        for number in range(50):
            store.put(f"/x/{number}", "x" * 10_000)
    assert store.get("/x/0") is not None
    store.close()
    full.kill()


def test_a_lease_that_runs_out_before_its_key_is_written_is_replaced() -> None:
    store = SlowStore()
    job = JobCoordinator(store, job="j")
    registration = job.register(member("w0"), lease_seconds=5)
    assert store.slow_puts == 0 and set(job.members()) == {"w0"}
    registration.withdraw()
    store.slow_puts = 100
    with pytest.raises(LeaseExpired):
        job.register(member("w1"), lease_seconds=5)
    store.close()


class SlowStore(MemoryStore):
    """The lease of each of the first ``slow_puts`` keys with one has run out when the key comes."""

    slow_puts = 2

    def put(self, key: str, value: str, *, lease: int | None = None) -> None:
        if lease is not None and self.slow_puts:
            self.slow_puts -= 1
            self.revoke(lease)
        super().put(key, value, lease=lease)


def test_a_watch_goes_on_after_a_restart_and_finds_what_it_missed(etcd: ManualEtcd, store: EtcdStore) -> None:
    other = EtcdStore([etcd.endpoint])
    job = JobCoordinator(other, job="j")
    watcher = JobCoordinator(store, job="j")
    start = first_epoch(WORKERS)
    job.propose(start, expected=None)
    job.mark_ended("w9", {})
    told: Collector[Change] = Collector()
    watcher.watch(told)
    told.wait_for(lambda change: change.kind == "resync")

    etcd.kill()
    etcd.start()
    epoch = job.propose_loss(["w1"], reason="gone", proposer="a")
    told.wait_for(lambda change: change.kind == "epoch" and change.value == epoch)
    wait_until(lambda: [c.kind for c in told.items].count("resync") == 2, what="the second resync")
    job.propose_loss(["w3"], reason="gone", proposer="a")
    told.wait_for(lambda change: change.kind == "epoch" and change.epoch == 2)
    epochs = [change.epoch for change in told.items if change.kind == "epoch"]
    assert epochs == [0, 1, 2], "each epoch is told once"
    assert [change.kind for change in told.items].count("ended") == 1, "what did not change is not told again"
    other.close()


def test_a_watch_notices_a_frozen_server_and_its_return(
    etcd: ManualEtcd, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_watch, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(etcd_watch, "_SILENCE_SECONDS", 1.0)
    told: Collector[StoreEvent] = Collector()
    store.watch("/x/", told)
    told.wait_for(lambda event: event.kind == "resync")
    etcd.freeze()
    time.sleep(1.7)  # longer than the silence that a watch puts up with
    etcd.thaw()
    wait_until(lambda: [e.kind for e in told.items].count("resync") >= 2, what="the watch to begin anew")
    store.put("/x/a", "1")
    told.wait_for(lambda event: event.value == "1")


def test_a_member_registers_again_after_an_outage_longer_than_its_lease(etcd: ManualEtcd, store: EtcdStore) -> None:
    job = JobCoordinator(store, job="j")
    registration = job.register(member("w0"), lease_seconds=1)
    job.propose(first_epoch(WORKERS), expected=None)
    etcd.freeze()
    time.sleep(2.2)  # the lease runs out on the server's clock
    etcd.thaw()
    told: Collector[Change] = Collector()
    job.watch(told)
    wait_until(lambda: "w0" in job.members(), what="the member's return")
    time.sleep(1.5)  # it must also stay, for longer than its lease
    assert "w0" in job.members() and not registration.lost.is_set()
    registration.withdraw()


def test_a_member_that_was_expelled_meanwhile_does_not_come_back() -> None:
    store = MemoryStore()
    job, others = JobCoordinator(store, job="j"), JobCoordinator(store, job="j")
    job.propose(first_epoch(WORKERS), expected=None)
    registration = job.register(member("w0"), lease_seconds=0.5)
    store.set_available(False)
    time.sleep(0.8)  # the lease runs out
    store.set_available(True)
    others.propose_loss(["w0"], reason="silent", proposer="a")
    assert registration.lost.wait(5)
    assert "w0" not in others.members()
    store.close()


def test_a_member_that_was_expelled_while_its_lease_lives_leaves_too() -> None:
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    registration = job.register(member("w0"), lease_seconds=0.3)
    job.propose(first_epoch(WORKERS), expected=None)
    time.sleep(0.5)  # it has seen itself in the epoch
    job.propose_loss(["w0"], reason="mistaken for dead", proposer="a")
    assert registration.lost.wait(2)
    assert job.members() == {}
    store.close()


def test_what_was_agreed_survives_an_etcd_that_lost_its_data(etcd: ManualEtcd, store: EtcdStore) -> None:
    job = JobCoordinator(store, job="j")
    registration = job.register(member("w0"), lease_seconds=1)
    told: Collector[Change] = Collector()
    job.watch(told)
    job.propose(first_epoch(WORKERS), expected=None)
    epoch = job.propose_loss(["w3"], reason="gone", proposer="a")
    told.wait_for(lambda change: change.epoch == 1)

    etcd.kill()
    etcd.wipe()
    etcd.start()
    wait_until(lambda: "w0" in job.members(), what="the member's return")
    assert not registration.lost.is_set()
    stranger = JobCoordinator(EtcdStore([etcd.endpoint]), job="j")
    wait_until(lambda: stranger.epoch() == epoch, what="the epoch to be put back")
    following = stranger.propose_loss(["w1"], reason="gone", proposer="b")
    told.wait_for(lambda change: change.value == following)
    registration.withdraw()
    stranger.close()


def test_a_cluster_goes_on_without_each_of_its_members_in_turn(tmp_path: Path) -> None:
    ports = free_ports("127.0.0.1", count=3)
    members = [ManualEtcd(tmp_path / str(number), peer_ports=ports, number=number) for number in range(3)]
    for each in members:
        each.launch()
    try:
        for each in members:
            each.wait_until_ready()
        store = EtcdStore([each.endpoint for each in members], call_timeout_seconds=10)
        told: Collector[StoreEvent] = Collector()
        store.watch("/x/", told)
        lease = store.grant_lease(5)
        store.put("/x/leased", "1", lease=lease)
        for number, each in enumerate(members):
            each.kill()  # one of the three is the leader
            store.put(f"/x/{number}", "written")
            assert store.keep_alive(lease) is True
            wait_until(lambda n=number: _told_of(told, store, f"/x/{n}"), what=f"news of the write without {number}")
            each.start()
        each.freeze()
        store.put("/x/frozen", "written")
        assert store.get("/x/leased") is not None
        store.close()
    finally:
        for each in members:
            each.kill()


def _told_of(told: Collector[StoreEvent], store: EtcdStore, key: str) -> bool:
    """By an event, or by a resync after the write, at which a reader would have found it."""
    entry = store.get(key)
    assert entry is not None
    return any(event.key == key or event.kind == "resync" for event in told.items[1:])


def test_that_it_is_no_etcd_is_not_forgotten_when_the_last_attempt_has_no_time_left() -> None:
    """So it is on loaded cores; what another server said is known by then."""
    first = [Refusal(grpc.StatusCode.UNAVAILABLE, "Trying to connect an http1.x server")]
    said = itertools.chain(first, itertools.repeat(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")))
    connection = EtcdConnection([Endpoint("127.0.0.1", 1)], call_timeout_seconds=0.5, attempt_timeout_seconds=0.1)

    def send(stubs: object, timeout: float) -> None:
        raise next(said)

    with pytest.raises(CoordinatorUnavailable, match="something answers at .* that is no etcd"):
        connection.call(send)
    assert next(said).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    connection.close()


class Refusal(grpc.RpcError):
    """An error as calls raise it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details
