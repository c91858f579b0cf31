"""Servers that talk to nobody without the secret: the handshake, stores, tunnels, the first words on a channel."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import torch

from deepspeed_bamboo.coordination import Member
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.protocol import SECRET as SECRET_NAME
from deepspeed_bamboo.runtime.comm import proved_group
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.frames import Frames
from deepspeed_bamboo.runtime.comm.guarded_store import StoreClient
from deepspeed_bamboo.runtime.comm.pass_words import PASS_WORD_BYTES, PassWords
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.comm.proved_group import connect_proved, network_device
from deepspeed_bamboo.runtime.comm.proved_mesh import ProvingGloo
from deepspeed_bamboo.runtime.comm.store_server import StoreServer
from deepspeed_bamboo.runtime.job.meeting import guarded_meetings
from deepspeed_bamboo.trust import server as server_module
from deepspeed_bamboo.trust.certificate import own_certificate, trusting
from deepspeed_bamboo.trust.handshake import GREETING, StrangerError, admit, prove
from deepspeed_bamboo.trust.server import GuardedServer, connect
from deepspeed_bamboo.trust.tunnel import Gate, Tunnel
from tests.coordination.helpers import wait_until

SECRET = "s" * 64


@pytest.fixture
def echo() -> Iterator[GuardedServer]:
    def serve(connection: socket.socket) -> None:
        while content := connection.recv(100):
            connection.sendall(content)

    server = GuardedServer("127.0.0.1", 0, secret=SECRET, purpose="echo", serve=serve)
    yield server
    server.close()


def ask(server: GuardedServer, *, secret: str = SECRET, purpose: str = "echo") -> bytes:
    with connect("127.0.0.1", server.port, secret=secret, purpose=purpose, within_seconds=5) as connection:
        connection.sendall(b"hello")
        return connection.recv(100)


def test_who_knows_the_secret_is_served(echo: GuardedServer) -> None:
    assert [ask(echo) for _ in range(3)] == [b"hello"] * 3


@pytest.mark.parametrize("wrong", [{"secret": "t" * 64}, {"secret": ""}, {"purpose": "store"}])
def test_another_secret_or_purpose_is_refused_on_both_sides(wrong: dict[str, Any], echo: GuardedServer) -> None:
    with pytest.raises(StrangerError, match="refused"):
        ask(echo, **wrong)
    assert ask(echo) == b"hello"


def test_a_server_that_does_not_know_the_secret_learns_nothing() -> None:
    """It may repeat what it hears, or what it has heard from another client."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(GREETING + b"\0" * 32)
                    heard.append(connection.recv(1000))
                    connection.sendall(heard[0][-32:])

        threading.Thread(target=pretend, daemon=True).start()
        for _ in range(2):
            with pytest.raises(StrangerError, match="does not know the job's secret"):
                connect("127.0.0.1", listener.getsockname()[1], secret=SECRET, purpose="echo")
    assert heard[0] != heard[1] and SECRET.encode() not in heard[0]


def test_what_was_heard_once_opens_nothing(echo: GuardedServer) -> None:
    one, other = socket.socketpair()
    answered: list[bytes] = []

    def listen() -> None:
        with contextlib.suppress(StrangerError), other:
            other.sendall(GREETING + b"\1" * 32)
            answered.append(other.recv(1000))

    thread = threading.Thread(target=listen)
    thread.start()
    with contextlib.suppress(StrangerError), one:
        prove(one, SECRET, purpose="echo", within_seconds=2)
    thread.join()
    with socket.create_connection(("127.0.0.1", echo.port)) as stranger:
        stranger.recv(1000)
        stranger.sendall(answered[0])
        assert stranger.recv(1000) == b""


def test_a_client_that_dribbles_has_no_more_time_than_others() -> None:
    one, other = socket.socketpair()
    start = time.monotonic()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for _ in range(40):
                other.sendall(b"b")
                time.sleep(0.05)

    threading.Thread(target=dribble, daemon=True).start()
    with one, pytest.raises(TimeoutError):
        admit(one, SECRET, purpose="echo", within_seconds=0.5)
    assert time.monotonic() - start < 1.5
    other.close()


def test_of_too_many_silent_connections_the_oldest_are_dropped(
    echo: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MOST_UNPROVED", 8)
    with contextlib.ExitStack() as silent:
        strangers = [silent.enter_context(socket.create_connection(("127.0.0.1", echo.port))) for _ in range(30)]
        assert ask(echo) == b"hello"
        strangers[0].settimeout(2)
        content = b""
        while piece := strangers[0].recv(1000):
            content += piece
        assert len(content) == 40


def test_who_proves_himself_just_before_the_end_of_listening_is_served(
    echo: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit_the_last(connection: socket.socket, secret: str, **rest: Any) -> None:
        admit(connection, secret, **rest)
        echo.stop_listening()

    monkeypatch.setattr(server_module, "admit", admit_the_last)
    assert ask(echo) == b"hello"


def test_noise_costs_no_thread(echo: GuardedServer) -> None:
    for length in (0, 1, 39, 72, 5000):
        with socket.create_connection(("127.0.0.1", echo.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(os.urandom(length))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
    assert ask(echo) == b"hello"
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("bamboo-echo-")]
    assert len(names) <= 1, "threads of strangers are still there"


# ---- stores ------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", secret=SECRET)
    yield server
    server.close()


def client(server: StoreServer, *, secret: str = SECRET, seconds: float = 5.0) -> StoreClient:
    return StoreClient("127.0.0.1", server.port, secret=secret, timeout=timedelta(seconds=seconds))


def test_a_store_does_what_torchs_does(store: StoreServer) -> None:
    stock = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def use(where: Any) -> list[Any]:
        where.set("a", "1")
        return [
            where.get("a"),
            where.add("n", 3),
            where.add("n", -1),
            where.get("n"),
            where.check(["a", "n"]),
            where.check(["a", "absent"]),
            where.compare_set("a", "1", "2"),
            where.compare_set("a", "1", "3"),
            where.compare_set("new", "", "first"),
            where.compare_set("absent", "something", "else"),
            where.delete_key("a"),
            where.delete_key("a"),
            where.wait(["n"], timedelta(seconds=1)),
        ]

    own = client(store)
    assert use(own) == use(stock)
    assert use(c10d.PrefixStore("p", own)) == use(c10d.PrefixStore("p", stock))
    with pytest.raises(c10d.DistStoreError, match="timeout"):
        own.wait(["absent"], timedelta(seconds=0.1))
    assert own.get("n") == b"2", "a wait in vain leaves it as it was"


def test_who_waits_for_a_key_gets_it_when_it_is_set(store: StoreServer) -> None:
    one, other = client(store), client(store)
    threading.Timer(0.1, lambda: other.set("late", b"\0\xff")).start()
    assert one.get("late") == b"\0\xff"


def test_a_write_that_failed_is_told_by_the_next_question_and_nothing_is_mixed_up(store: StoreServer) -> None:
    own = client(store)
    own.set("a", "1")
    own._send(("set", 1, b""), seconds=5)
    own._owed += 1
    own.set("b", "2")
    with pytest.raises(c10d.DistStoreError, match="no text"):
        own.get("a")
    assert [own.get("a"), own.get("b")] == [b"1", b"2"]


def test_a_store_is_closed_to_others(store: StoreServer) -> None:
    with pytest.raises(c10d.DistNetworkError, match="does not know this secret"):
        client(store, secret="t" * 64)
    with pytest.raises(RuntimeError):
        c10d.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    "request_",
    [
        ["set", 1, b""],
        ["set", "a"],
        ["set", "a", "text"],
        ["close"],
        ["__init__"],
        [],
        "set",
        None,
        {"a": 1},
        [["set"]],
    ],
)
def test_requests_that_make_no_sense_get_an_error_each(request_: Any, store: StoreServer) -> None:
    own = client(store)
    if request_ is None or not isinstance(request_, list):
        with pytest.raises(MessageError):
            store._answer(request_)
        return
    with pytest.raises(c10d.DistStoreError, match="makes no sense|names nothing|no text"):
        own._ask(*request_)
    own.set("a", "still there")


def test_frames_that_are_none_are_refused() -> None:
    for content in (b"\xff\xff\xff\xff", b"\4\0\0\0\xc1\xc1\xc1\xc1", b"\2\0\0\0\x91\x91",
                    (3).to_bytes(4, "little") + msgpack.packb(msgpack.ExtType(1, b"x"))):  # fmt: skip
        one, other = socket.socketpair()
        with one, other:
            other.sendall(content)
            other.shutdown(socket.SHUT_WR)
            with pytest.raises(MessageError):
                Frames(one).receive()


# ---- tunnels -----------------------------------------------------------------------------------------


def test_a_tunnel_leads_to_a_unix_socket_of_another_machine(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "target"))
        listener.listen()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(connection.recv(2**20)[::-1])

        threading.Thread(target=serve, daemon=True).start()
        gate = Gate("127.0.0.1", target=tmp_path / "target", secret=SECRET)
        known = gate.certificate
        for _ in range(2):
            tunnel = Tunnel("127.0.0.1", gate.port, secret=SECRET, certificate=known)
            assert tunnel.path.parent.stat().st_mode & 0o077 == 0
            with socket.socket(socket.AF_UNIX) as user:
                user.connect(str(tunnel.path))
                user.sendall(b"abc")
                assert user.makefile("rb").read() == b"cba"
            tunnel.close()
            assert not tunnel.path.exists()
        stranger = Tunnel("127.0.0.1", gate.port, secret="t" * 64, certificate=known)
        with socket.socket(socket.AF_UNIX) as user:
            user.connect(str(stranger.path))
            assert user.makefile("rb").read() == b""
        stranger.close()
        gate.close()


@pytest.fixture
def echoing_gate(tmp_path: Path) -> Iterator[Gate]:
    """Leads to a Unix socket that says again what it hears."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "target"))
        listener.listen()

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while content := connection.recv(2**16):
                    connection.sendall(content)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        gate = Gate("127.0.0.1", target=tmp_path / "target", secret=SECRET)
        yield gate
        gate.close()
        listener.shutdown(socket.SHUT_RDWR)


def through(tunnel: Tunnel, content: bytes) -> bytes:
    """As much as ``content`` of what comes back from the other end; less where nobody is there."""
    with contextlib.closing(tunnel), socket.socket(socket.AF_UNIX) as user:
        user.connect(str(tunnel.path))
        user.settimeout(60)
        sender = threading.Thread(target=_send, args=(user, content), daemon=True)
        sender.start()
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = user.makefile("rb").read(len(content))
        sender.join()
        return received


def _send(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(content)


def test_much_goes_through_a_tunnel_both_ways_at_once(echoing_gate: Gate) -> None:
    content = os.urandom(8 * 2**20)
    tunnel = Tunnel("127.0.0.1", echoing_gate.port, secret=SECRET, certificate=echoing_gate.certificate)
    assert through(tunnel, content) == content


@pytest.mark.parametrize("said", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"x" * 200, b""])
def test_who_says_plain_text_to_a_gate_gets_nothing(said: bytes, echoing_gate: Gate) -> None:
    with socket.create_connection(("127.0.0.1", echoing_gate.port)) as stranger:
        heard = b""
        with contextlib.suppress(OSError):  # it may have been closed already
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            heard = stranger.makefile("rb").read()
        assert len(heard) <= 7, "TLS's own word for a refusal"
    with pytest.raises((OSError, StrangerError)):  # with the secret, too
        connect("127.0.0.1", echoing_gate.port, secret=SECRET, purpose="etcd", within_seconds=0.3)


def test_what_goes_through_a_tunnel_can_be_read_by_nobody_between(echoing_gate: Gate) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while piece := source.recv(2**16):
                    heard.extend(piece)
                    target.sendall(piece)

        def listen() -> None:
            one, _ = between.accept()
            with one, socket.create_connection(("127.0.0.1", echoing_gate.port)) as other:
                threading.Thread(target=pass_on, args=(other, one), daemon=True).start()
                pass_on(one, other)

        threading.Thread(target=listen, daemon=True).start()
        port = between.getsockname()[1]
        tunnel = Tunnel("127.0.0.1", port, secret=SECRET, certificate=echoing_gate.certificate)
        assert through(tunnel, b"to be kept between us" * 9) == b"to be kept between us" * 9
    assert len(heard) > 1000 and b"kept" not in heard and GREETING not in heard


def test_who_has_another_certificate_is_refused_whatever_he_knows(
    echoing_gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Even with the job's secret, and on either side; and it is said once."""
    tunnel = Tunnel("127.0.0.1", echoing_gate.port, secret=SECRET, certificate=own_certificate()[0])
    with socket.socket(socket.AF_UNIX) as again:
        again.connect(str(tunnel.path))
        assert again.recv(10) == b""
    assert through(tunnel, b"hello") == b""
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"not this job's etcd is at 127.0.0.1:{echoing_gate.port}" in said and "certificate" in said


def test_what_is_no_certificate_is_refused() -> None:
    for text in ("", "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n", "ü"):
        with pytest.raises(MessageError, match="as its certificate, which is none"):
            trusting(text)


def test_of_too_many_silent_connections_to_an_encrypted_server_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, echoing_gate: Gate
) -> None:
    monkeypatch.setattr(server_module, "_MOST_UNPROVED", 4)
    with contextlib.ExitStack() as silent:
        strangers = [silent.enter_context(socket.create_connection(("127.0.0.1", echoing_gate.port))) for _ in range(9)]
        tunnel = Tunnel("127.0.0.1", echoing_gate.port, secret=SECRET, certificate=echoing_gate.certificate)
        assert through(tunnel, b"hello") == b"hello"
        strangers[0].settimeout(4)  # less than the time that it would have had
        assert strangers[0].recv(1) == b""


# ---- gloo, which asks nobody who he is ---------------------------------------------------------------------


def test_a_stranger_who_connects_to_gloo_in_advance_keeps_nobody_from_the_next_channels() -> None:
    """With the numbers that the next connections will have: gloo would take him for the peer."""
    names = ("w0", "w1")
    servers = {name: StoreServer("127.0.0.1", secret=SECRET) for name in names}
    members = {n: Member(n, n, "z", "127.0.0.1", servers[n].port, os.getpid(), 0) for n in names}
    links = {
        n: Links(n, interruption=Interruption(), timeout_seconds=5, device=torch.device("cpu"), secret=SECRET)
        for n in names
    }

    def meet(epoch: str) -> None:
        def enter(name: str, other: str) -> None:
            links[name].enter(members=members, order=names, name=epoch)
            links[name].connect([other])

        both = [threading.Thread(target=enter, args=pair) for pair in (names, names[::-1])]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        links["w0"].send("w1", Message(epoch, data=epoch))
        assert links["w1"].receive("w0", epoch).data == epoch

    meet("epoch 0")
    with contextlib.ExitStack() as strangers:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1":
                for number in range(20):
                    stranger = socket.create_connection(connection.laddr)
                    strangers.enter_context(stranger)
                    stranger.sendall(number.to_bytes(8, "little"))
        meet("epoch 1")
    for name in names:
        links[name].close()
        servers[name].close()


def groups_of(*secrets: str) -> list[Any]:
    """What each member gets, whose secret is given: a group, or an error."""
    store, results = c10d.HashStore(), [None] * len(secrets)
    torchs = importlib.import_module("torch.distributed.distributed_c10d")

    def make(rank: int) -> None:
        maker = ProvingGloo(torchs.ProcessGroupGloo, secret=secrets[rank])
        try:
            results[rank] = maker(store, rank, len(secrets), timeout=timedelta(seconds=20))
        except StrangerError as error:
            results[rank] = error

    members = [threading.Thread(target=make, args=(rank,)) for rank in range(len(secrets))]
    for thread in members:
        thread.start()
    for thread in members:
        thread.join()
    return results


def test_members_of_torchs_own_groups_prove_themselves_before_anything_is_sent() -> None:
    assert [group.rank() for group in groups_of(SECRET, SECRET, SECRET)] == [0, 1, 2]
    one, two, stranger = groups_of(SECRET, SECRET, "t" * 64)
    assert all(isinstance(found, StrangerError) for found in (one, two, stranger))
    assert "in the place of rank 2 does not know" in str(one) and "in the place of rank 2 does not know" in str(two)


def test_torch_makes_proved_groups_for_a_script_and_knows_them_as_its_own() -> None:
    torchs = importlib.import_module("torch.distributed.distributed_c10d")
    stock = torchs.ProcessGroupGloo
    with guarded_meetings({SECRET_NAME: SECRET}):
        made = torchs.ProcessGroupGloo(c10d.HashStore(), 0, 1, timeout=timedelta(seconds=20))
        assert isinstance(torchs.ProcessGroupGloo, ProvingGloo)
        assert isinstance(made, torchs.ProcessGroupGloo) and type(made) is stock
        assert torchs.ProcessGroupGloo._Options is stock._Options
    assert torchs.ProcessGroupGloo is stock


class Hurried:
    """A store whose user is kept until ``first`` has been done: where it would find the other side's address."""

    def __init__(self, store: StoreServer, first: Callable[[], None]) -> None:
        self._store, self._first = store, first

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def fetch(self, key: str, *, within_seconds: float) -> bytes:
        found = self._store.fetch(key, within_seconds=within_seconds)
        self._first()
        return found


@pytest.mark.parametrize("habit", ["silent", "gone", "talking"])
def test_a_stranger_who_takes_the_peers_place_costs_another_attempt_and_no_loss(
    habit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proved_group, "CONNECTING_SECONDS", 1.0)
    known = listening_ports()
    strangers: list[socket.socket] = []
    one_at_a_time = threading.Lock()

    def take_places() -> None:
        with one_at_a_time:
            if strangers:
                return
            for port in listening_ports() - known - {store.port}:
                for number in range(60):
                    stranger = socket.create_connection(("127.0.0.1", port))
                    stranger.sendall(number.to_bytes(8, "little") + (b"hello" * 100 if habit == "talking" else b""))
                    strangers.append(stranger)
            if habit == "gone":
                for stranger in strangers:
                    stranger.close()

    store = StoreServer("127.0.0.1", secret=SECRET)
    groups: dict[bool, Any] = {}
    warnings: list[str] = []
    monkeypatch.setattr(proved_group.logger, "log", lambda _, text, *rest: warnings.append(text % rest))

    def meet(first: bool) -> None:
        groups[first] = connect_proved(
            Hurried(store, take_places),
            name="pair",
            first=first,
            peer="w1",
            secret=SECRET,
            network=network_device({"GLOO_SOCKET_IFNAME": "lo"}),
            timeout_seconds=20,
        )

    both = [threading.Thread(target=meet, args=(first,)) for first in (True, False)]
    for side in both:
        side.start()
    for side in both:
        side.join()
    assert warnings and "again" in warnings[0]
    received = torch.zeros(1)
    sending = groups[True].send([torch.ones(1)], 1, 1)
    groups[False].recv([received], 0, 1).wait()
    sending.wait()
    assert received.item() == 1.0
    store.close()
    for stranger in strangers:
        stranger.close()


def listening_ports() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def test_a_peer_whose_address_nobody_knows_is_no_endless_wait() -> None:
    """Its registration is away for a moment: nobody knows it, or somebody knew it in the epoch before."""
    server = StoreServer("127.0.0.1", secret=SECRET)
    known = Member("w0", "w0", "z", "127.0.0.1", server.port, os.getpid(), 0)
    links = Links("w1", interruption=Interruption(), timeout_seconds=5, device=torch.device("cpu"), secret=SECRET)
    links.enter(members={}, order=("w0", "w1"), name="epoch 0")
    with pytest.raises(PeerLostError, match="w0 is not registered"):
        links.connect(["w0"])
    links.enter(members={"w0": known}, order=("w0", "w1"), name="epoch 1")
    links.enter(members={}, order=("w0", "w1"), name="epoch 2")
    assert links.members == {"w0": known}
    links.enter(members={}, order=("w1", "w2"), name="epoch 3")
    assert links.members == {}
    server.close()


def test_whoever_knows_the_others_beforehand_makes_no_connection_to_their_stores_at_a_loss() -> None:
    names = ("w0", "w1")
    servers = {name: StoreServer("127.0.0.1", secret=SECRET) for name in names}
    members = {n: Member(n, n, "z", "127.0.0.1", servers[n].port, os.getpid(), 0) for n in names}
    links = {
        n: Links(
            n,
            interruption=Interruption(),
            timeout_seconds=20,
            device=torch.device("cpu"),
            secret=SECRET,
            own_store=servers[n],
        )
        for n in names
    }
    for name in names:
        links[name].enter(members=members, order=names, name="epoch 0")
        links[name].acquaint(lambda: names)
    for thread in threading.enumerate():
        if thread.name == "bamboo-acquaintances":
            thread.join()
    for name in names:
        servers[name]._server.stop_listening()
        links[name].enter(members=members, order=names, name="epoch 1")
    both = [threading.Thread(target=links[one].connect, args=([other],)) for one, other in (names, names[::-1])]
    for side in both:
        side.start()
    for side in both:
        side.join()
    links["w0"].send("w1", Message("hello"))
    assert links["w1"].receive("w0", "hello").key == "hello"
    for name in names:
        links[name].close()
        servers[name].close()


# ---- the first words on a channel --------------------------------------------------------------------


def pass_words(secrets: tuple[str, str] = (SECRET, SECRET)) -> tuple[PassWords, PassWords]:
    one, other = PassWords(secret=secrets[0], first=True), PassWords(secret=secrets[1], first=False)
    one.hear(other.nonce)
    other.hear(one.nonce)
    return one, other


def test_both_sides_of_a_channel_know_each_other_by_what_they_say() -> None:
    one, other = pass_words()
    one.check(other.own(), peer="w1")
    other.check(one.own(), peer="w0")
    assert len(one.own()) == PASS_WORD_BYTES and one.own() != other.own()


def test_silence_an_echo_another_secret_and_yesterdays_word_are_refused() -> None:
    one, other = pass_words()
    before = pass_words()
    _, without = pass_words((SECRET, "t" * 64))
    for word in (b"", b"\0" * PASS_WORD_BYTES, one.own(), before[1].own(), without.own(), other.own()[:-1]):
        with pytest.raises(StrangerError, match="in the place of worker w1"):
            one.check(word, peer="w1")


def test_a_client_knows_whether_its_server_is_still_there() -> None:
    server = StoreServer("127.0.0.1", secret=SECRET)
    client = StoreClient("127.0.0.1", server.port, secret=SECRET, timeout=timedelta(seconds=20))
    assert client.is_open()
    client.set("a", b"1")
    assert client.get("a") == b"1" and client.is_open()
    server.close()
    wait_until(lambda: not client.is_open())
