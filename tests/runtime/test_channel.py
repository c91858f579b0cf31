"""Channels between two workers, both ends in this process."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from deepspeed_bamboo.runtime.comm import proved_group
from deepspeed_bamboo.runtime.comm.channel import Channel, Message
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.proved_group import connect_proved, network_device
from deepspeed_bamboo.runtime.comm.store_server import StoreServer

_SECRET = "of this test"
_OPERATION_SECONDS = 5.0


def _pair() -> tuple[Channel, Channel]:
    store = StoreServer("127.0.0.1", secret=_SECRET)
    ends: dict[bool, Channel] = {}

    def make(*, first: bool) -> None:
        group = connect_proved(
            store,
            name="a pair",
            first=first,
            peer=f"other of {first}",
            secret=_SECRET,
            network=network_device(),
            timeout_seconds=_OPERATION_SECONDS,
        )
        ends[first] = Channel(group, first=first, peer=f"other of {first}", interruption=Interruption())

    other = threading.Thread(target=make, kwargs={"first": False})
    other.start()
    make(first=True)
    other.join()
    store.close()
    return ends[True], ends[False]


def test_messages_arrive_in_order_with_their_tensors() -> None:
    one, other = _pair()
    for number in range(3):
        one.send(Message(f"m{number}", data={"n": number}, tensors=[torch.full((2, 3), float(number))]))
    received = [other.receive() for _ in range(3)]
    one.flush(within_seconds=20.0)
    assert [message.key for message in received] == ["m0", "m1", "m2"]
    assert all(torch.equal(m.tensors[0], torch.full((2, 3), float(n))) for n, m in enumerate(received))


class _Counted:
    def __init__(self) -> None:
        self.total, self.arrived = 0, list[int]()

    def expect(self, total: int) -> None:
        self.total += total

    def add(self, done: int) -> None:
        self.arrived.append(done)


def test_a_long_message_comes_in_pieces_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_bamboo.runtime.comm.channel._PIECE_BYTES", 1000)
    one, other = _pair()
    sent = [torch.arange(600, dtype=torch.float32), torch.empty(0), torch.arange(25, dtype=torch.int64)]
    one.send(Message("long", tensors=sent))
    one.send(Message("short", tensors=[torch.ones(1)]))
    counted = _Counted()
    received = other.receive(meter=counted)
    assert all(torch.equal(here, there) for here, there in zip(received.tensors, sent, strict=True))
    assert (counted.total, counted.arrived) == (2600, [1000, 1000, 600])
    assert torch.equal(other.receive().tensors[0], torch.ones(1)) and len(counted.arrived) == 3
    one.flush(within_seconds=20.0)


def test_draining_never_waits_for_a_peer_that_has_stopped_asking() -> None:
    """A stopped peer asks for nothing: an iteration's end must not wait for it, or nobody sees the next epoch."""
    one, other = _pair()
    one.send(Message("asked for"))
    assert other.receive().key == "asked for"
    one.drain()
    one.send(Message("not asked for"))
    before = time.monotonic()
    one.drain()
    assert time.monotonic() - before < _OPERATION_SECONDS / 2
    assert other.receive().key == "not asked for"


def test_a_message_may_take_longer_than_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proved_group, "CONNECTING_SECONDS", 0.2)
    one, other = _pair()
    late = threading.Timer(0.5, one.send, [Message("late")])
    late.start()
    assert other.receive().key == "late"
    late.join()


def test_draining_to_a_peer_that_is_gone_is_no_error_but_expecting_something_of_it_is() -> None:
    """Found by a kill from outside between the last agreement of an iteration and its end."""
    one, other = _pair()
    one.send(Message("never asked for"))
    other._group.abort()
    one.drain()
    one.drain()
    with pytest.raises(PeerLostError):
        one.receive()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[../gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer. GLHF!",
         "the connection was reset"),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:27", "the connection was closed"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", "the connection timed out"),
        ("The client socket has timed out after 1000ms while trying to connect", "the connection timed out"),
        ("[gloo/transport/tcp/pair.cc:9] Something new \U0001f3d6", "the connection failed"),
        ("NCCL error in: x.cpp:1, remote process exited", "the connection failed"),
        ("the peer has dropped the channel\nmore", "the peer has dropped the channel"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_people_are_told_causes_in_their_own_words(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text)) == cause


def test_channels_use_the_interface_that_torchs_groups_use() -> None:
    assert type(network_device({"GLOO_SOCKET_IFNAME": "lo,eth0"})).__name__ == "Device"
    with pytest.raises(RuntimeError):
        network_device({"GLOO_SOCKET_IFNAME": "no-such-interface"})
