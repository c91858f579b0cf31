"""The exchange of collectives among workers: the sums of one worker that has everything, whoever hosts what."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.exchange import CHUNKED_FROM, exchange_requests
from deepspeed_bamboo.runtime.stock.logical import GroupKey
from deepspeed_bamboo.runtime.stock.suspended import Request

SIZES = (1, 7, CHUNKED_FROM - 1, CHUNKED_FROM, 3 * CHUNKED_FROM + 1)


class Post:
    """Messages between threads, by receiver, sender and key."""

    def __init__(self) -> None:
        self._there: dict[tuple[str, str, str], Message] = {}
        self._changed = threading.Condition()
        self.largest = 0

    def links(self, me: str) -> Any:
        return SimpleNamespace(
            send=lambda peer, message: self._send(peer, me, message),
            receive=lambda peer, key: self._receive(me, peer, key),
        )

    def _send(self, receiver: str, sender: str, message: Message) -> None:
        with self._changed:
            assert (receiver, sender, message.key) not in self._there, f"{message.key} twice"
            self._there[receiver, sender, message.key] = message
            self.largest = max(self.largest, *(tensor.numel() for tensor in message.tensors))
            self._changed.notify_all()

    def _receive(self, receiver: str, sender: str, key: str) -> Message:
        with self._changed:
            place = (receiver, sender, key)
            assert self._changed.wait_for(lambda: place in self._there, timeout=20.0), f"{sender} never sent {key}"
            return self._there.pop(place)

    @property
    def left(self) -> int:
        return len(self._there)


def exchange(pending: dict[Coordinate, Request], owners: dict[Coordinate, str]) -> tuple[dict[Coordinate, Any], Post]:
    """All workers' answers, and the post they used."""
    post, answers, errors = Post(), {}, []
    placement: Any = SimpleNamespace(owners=tuple(owners.items()))

    def work(me: str) -> None:
        own = {c: request for c, request in pending.items() if owners[c] == me}
        try:
            answers.update(exchange_requests(own, links=post.links(me), placement=placement, me=me, label="5/reduce"))
        except (AssertionError, RuntimeError, KeyError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in set(owners.values())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert post.left == 0, "everything sent is received"
    return answers, post


def requests(
    group: Sequence[Coordinate], operation: str, shape: tuple[int, ...], kind: str
) -> dict[Coordinate, Request]:
    key = GroupKey(kind, tuple(group))
    numbers = torch.Generator().manual_seed(len(group))
    return {c: Request(key, operation, torch.randn(shape, generator=numbers), 0) for c in group}


@given(
    pipelines=st.integers(2, 5),
    stages=st.integers(1, 3),
    size=st.sampled_from(SIZES),
    operation=st.sampled_from(["sum", "mean", "max", "min", "broadcast:1", "gather"]),
    hosts=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_answers_are_those_of_one_worker_with_everything(
    pipelines: int, stages: int, size: int, operation: str, hosts: Any
) -> None:
    workers = [f"w{number}" for number in range(pipelines * stages)]
    pending: dict[Coordinate, Request] = {}
    for stage in range(stages):
        group = [Coordinate(pipeline, stage) for pipeline in range(pipelines)]
        pending.update(requests(group, operation, (size,), "data"))
    owners = {c: hosts.draw(st.sampled_from(workers)) for c in pending}
    before = {c: request.tensor.clone() for c, request in pending.items() if request.tensor is not None}
    answers, post = exchange(pending, owners)
    for coordinate, request in pending.items():
        assert request.group is not None
        expected = combine(operation, [before[member] for member in request.group.members])
        assert torch.equal(answers[coordinate], expected)
        assert torch.equal(before[coordinate], pending[coordinate].tensor), "what was handed in stays as it is"  # type: ignore[arg-type]
    if size >= CHUNKED_FROM and operation in ("sum", "mean", "max", "min"):
        assert post.largest <= -(-size // pipelines), "nobody sends more than a chunk at once"


def test_shapes_survive_and_gates_get_nothing() -> None:
    group = [Coordinate(0, 0), Coordinate(1, 0)]
    pending = requests(group, "sum", (40, 50), "data")
    answers, _ = exchange(pending, {group[0]: "a", group[1]: "b"})
    assert answers[group[0]].shape == (40, 50)
    gate = {group[0]: Request(None, "gate", None, 0)}
    assert exchange(gate, {group[0]: "a"})[0] == {group[0]: None}


@pytest.mark.parametrize("size", [5, CHUNKED_FROM])
def test_one_that_has_to_wait_for_another_here_is_left_out(size: int) -> None:
    ends, inner = (Coordinate(0, 0), Coordinate(0, 3)), (Coordinate(0, 0), Coordinate(0, 2))
    first = requests(ends, "sum", (size,), "tied:a")
    later = requests(inner, "sum", (size,), "tied:b")
    owners = {Coordinate(0, 0): "a", Coordinate(0, 2): "a", Coordinate(0, 3): "b"}
    answers, _ = exchange({**first, Coordinate(0, 2): later[Coordinate(0, 2)]}, owners)
    assert answers.keys() == set(ends), "(0, 0) reduces with (0, 3) first"
