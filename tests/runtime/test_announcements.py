"""Announced messages: the header goes ahead of the tensors, and the tensors have to be as announced."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_bamboo.errors import ModelError
from deepspeed_bamboo.runtime.comm.channel import Channel, Message, go_by_lane
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.nccl import as_known
from deepspeed_bamboo.runtime.comm.proved_group import connect_proved, network_device
from deepspeed_bamboo.runtime.comm.store_server import StoreServer


class Lanes:
    """A lane inside one process. Tensors on the meta device stand for a GPU's: they never touch the channel."""

    def __init__(self, out: queue.Queue[Any], incoming: queue.Queue[Any]) -> None:
        self.out, self.incoming = out, incoming

    def send(self, tensors: Any) -> None:
        self.out.put(list(tensors))

    def receive(self, description: Any) -> Any:
        return self

    def wait(self, interruption: Interruption) -> Any:
        return self.incoming.get(timeout=20)

    def abort(self) -> None: ...


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    store, made = StoreServer("127.0.0.1", secret="s"), {}

    def build(first: bool) -> None:
        group = connect_proved(
            store, name="p", first=first, peer="peer", secret="s", network=network_device(), timeout_seconds=20
        )
        made[first] = Channel(group, first=first, peer="peer", interruption=Interruption())

    threads = [threading.Thread(target=build, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    there: queue.Queue[Any] = queue.Queue()
    back: queue.Queue[Any] = queue.Queue()
    made[True].lanes, made[False].lanes = Lanes(there, back), Lanes(back, there)  # type: ignore[assignment]
    yield made[True], made[False]
    made[True].close()
    made[False].close()


def message(key: str, *shape: int) -> Message:
    return Message(key, data=True, tensors=[torch.empty(shape, device="meta")], kind="activation")


def test_header_of_an_announced_message_comes_before_its_tensors(pair: tuple[Channel, Channel]) -> None:
    sender, receiver = pair
    sender.send(message("0", 2, 3))
    assert receiver.receive().key == "0"
    sender.announce("1", kind="activation")
    receiver.expect(1)
    receiver._interruption.wait_until(lambda: bool(receiver._arrived), timeout_seconds=20)
    assert [arrived.key for arrived in receiver._arrived] == ["1"]
    sender.send(message("1", 2, 3))
    received = receiver.receive()
    assert (received.key, received.data, received.by_lane) == ("1", True, True)
    assert received.tensors[0].shape == (2, 3)


def test_a_reader_may_hear_of_a_lane_from_its_peer_first(pair: tuple[Channel, Channel]) -> None:
    """Both sides make it at once, and one is the first that uses it."""
    sender, receiver = pair
    made = receiver._lanes
    receiver._lanes = None
    receiver._has_lanes.clear()
    receiver.expect(1)
    sender.send(message("0", 2, 3))
    assert made is not None
    receiver.lanes = made
    received = receiver.receive()
    assert (received.key, received.by_lane) == ("0", True)


def test_first_message_of_a_kind_is_not_announced(pair: tuple[Channel, Channel]) -> None:
    sender, receiver = pair
    sender.announce("0", kind="activation")
    sender.send(message("0", 4))
    sender.send(message("1", 5))
    assert [receiver.receive().tensors[0].shape for _ in range(2)] == [(4,), (5,)]


def test_forms_that_are_forgotten_may_change(pair: tuple[Channel, Channel]) -> None:
    """As with engine.reset_activation_shape()."""
    sender, receiver = pair
    sender.send(message("0", 2, 3))
    sender.forget_forms()
    sender.announce("1", kind="activation")
    sender.send(message("1", 2, 4))
    assert [receiver.receive().tensors[0].shape for _ in range(2)] == [(2, 3), (2, 4)]


def test_what_is_partly_on_the_host_goes_by_way_of_it() -> None:
    on_device, on_host = torch.empty(2, device="meta"), torch.empty(2)
    assert go_by_lane([on_device]) and not go_by_lane([on_device, on_host]) and not go_by_lane([on_host])
    assert not go_by_lane([])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float32, torch.bool])
def test_types_without_a_name_in_nccl_are_sent_as_bytes(dtype: torch.dtype) -> None:
    sent, received = torch.ones(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    as_known(received).copy_(as_known(sent))
    assert torch.equal(sent, received) and as_known(sent).dtype in (torch.uint8, torch.float32, torch.bool)


def test_tensors_that_are_not_as_announced_are_the_models_error(pair: tuple[Channel, Channel]) -> None:
    sender, _ = pair
    sender.send(message("0", 2, 3))
    sender.announce("1", kind="activation")
    with pytest.raises(ModelError, match="dynamic_shape=True"):
        sender.send(message("1", 2, 4))
