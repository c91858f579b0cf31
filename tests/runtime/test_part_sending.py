"""A copy of a stage sent at once or in pieces arrives as it was, and no faster than it may."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import ExpelledError, MessageError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.recovery.memory_parts import MemoryPart, SealedPart
from deepspeed_bamboo.runtime.recovery.part_sending import Pace, begun, receive_part, send_part

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
MEGABYTE = 2**20


class Wire:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, worker: str, message: Message) -> None:
        self.sent.append(message)

    def receive(self, worker: str, key: str) -> Message:
        message = self.sent.pop(0)
        assert message.key == key
        return message


class Waited(threading.Event):
    """An event whose waits move the clock; they end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds += timeout or 0.0
        return self.is_set()


def sealed_part(*shapes: tuple[int, ...]) -> SealedPart:
    made = torch.Generator().manual_seed(1)
    tensors = [
        torch.randint(0, 2, shape, generator=made).to(DTYPES[number % len(DTYPES)])
        for number, shape in enumerate(shapes)
    ]
    part = MemoryPart(7, Coordinate(0, 1), b"body", tensors)
    return SealedPart(part, part.sha256())


shapes = st.lists(st.lists(st.integers(0, 60), max_size=3).map(tuple), max_size=6)


@given(shapes=shapes, limit=st.sampled_from([None, 0.25, 1000.0]))
@settings(max_examples=60, deadline=None)
def test_it_arrives_as_it_was(shapes: list[tuple[int, ...]], limit: float | None) -> None:
    wire, sealed, waited = Wire(), sealed_part(*shapes), Waited()
    send_part(wire, "w1", "7/0.1", sealed, pace=Pace(limit, given_up=waited, clock=lambda: waited.seconds))
    arrived = receive_part(wire, "w0", "7/0.1")
    assert arrived.is_of(7, Coordinate(0, 1)) and not wire.sent
    assert [(t.dtype, t.shape) for t in arrived.part.tensors] == [(t.dtype, t.shape) for t in sealed.part.tensors]


def test_no_more_than_so_many_bytes_a_second() -> None:
    wire, waited = Wire(), Waited()
    sealed = sealed_part((3, MEGABYTE // 4), (), (5, 0))  # 3 MiB, and two bytes
    pace = Pace(0.5, given_up=waited, clock=lambda: waited.seconds)
    for _ in range(2):
        send_part(wire, "w1", "7/0.1", sealed, pace=pace)
    assert waited.seconds == pytest.approx(12, rel=0.01)
    assert max(t.numel() for message in wire.sent for t in message.tensors) <= 0.1 * 0.5 * MEGABYTE + 2**16


def test_without_a_limit_it_is_one_message_and_nobody_waits() -> None:
    wire, waited = Wire(), Waited()
    send_part(wire, "w1", "7/0.1", sealed_part((9,), (4,)), pace=Pace(None, given_up=waited))
    assert len(wire.sent) == 1 and waited.seconds == 0


def test_a_round_that_is_given_up_sends_no_more() -> None:
    wire, waited = Wire(), Waited()
    waited.set()
    with pytest.raises(ExpelledError):
        send_part(wire, "w1", "7/0.1", sealed_part((MEGABYTE,)), pace=Pace(0.5, given_up=waited))
    assert len(wire.sent) == 2


def test_pieces_of_something_else_are_refused() -> None:
    wire = Wire()
    send_part(wire, "w1", "7/0.1", sealed_part((9,)), pace=Pace(1.0, given_up=Waited()))
    wire.sent[1] = Message("7/0.1/0", None, [torch.zeros(99, dtype=torch.uint8)])
    with pytest.raises(MessageError, match="piece 0 of 7/0.1 has 99 bytes"):
        receive_part(wire, "w0", "7/0.1")


def test_what_is_begun_runs_beside_and_its_error_is_that_of_the_result() -> None:
    go = threading.Event()

    def fail() -> None:
        raise LookupError("no copy")

    one, other = begun(lambda: None if go.wait(10.0) else fail()), begun(fail)
    assert not one.done()
    go.set()
    assert one.result(10.0) is None
    with pytest.raises(LookupError, match="no copy"):
        other.result(10.0)
