"""Channels between two workers, both ends in this process."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from deepspeed_bamboo.runtime.c10d import c10d
from deepspeed_bamboo.runtime.channel import Channel, Message
from deepspeed_bamboo.runtime.interruption import Interruption, PeerLostError

_OPERATION_SECONDS = 20.0


def _pair() -> tuple[Channel, Channel]:
    store = c10d.HashStore()
    ends: dict[bool, Channel] = {}

    def make(*, first: bool) -> None:
        ends[first] = Channel(
            store,
            first=first,
            peer=f"other of {first}",
            interruption=Interruption(),
            timeout_seconds=_OPERATION_SECONDS,
        )

    other = threading.Thread(target=make, kwargs={"first": False})
    other.start()
    make(first=True)
    other.join()
    return ends[True], ends[False]


def test_messages_arrive_in_order_with_their_tensors() -> None:
    one, other = _pair()
    for number in range(3):
        one.send(Message(f"m{number}", data={"n": number}, tensors=[torch.full((2, 3), float(number))]))
    received = [other.receive() for _ in range(3)]
    one.flush(within_seconds=20.0)
    assert [message.key for message in received] == ["m0", "m1", "m2"]
    assert all(torch.equal(m.tensors[0], torch.full((2, 3), float(n))) for n, m in enumerate(received))


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


def test_draining_to_a_peer_that_is_gone_is_no_error_but_expecting_something_of_it_is() -> None:
    """Found by a kill from outside between the last agreement of an iteration and its end."""
    one, other = _pair()
    one.send(Message("never asked for"))
    other._group.abort()
    one.drain()
    one.drain()
    with pytest.raises(PeerLostError):
        one.receive()
