"""Everybody gets everybody's value through the tree, and nobody before the last one has handed in."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import pytest

from deepspeed_bamboo.core.peers import tree_neighbours
from deepspeed_bamboo.runtime.comm.all_gather import agree
from deepspeed_bamboo.runtime.comm.channel import Message


class Wires:
    """Queues between threads in place of channels between processes."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str, str], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def of(self, me: str) -> Any:
        wires = self

        class End:
            def send(self, worker: str, message: Message) -> None:
                wires._queues[me, worker, message.key].put(message)

            def receive(self, worker: str, key: str) -> Message:
                return wires._queues[worker, me, key].get(timeout=20)

        return End()


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 14])
def test_everybody_gets_all_values_once_the_last_has_handed_in(count: int, fan_out: int) -> None:
    wires, workers = Wires(), [f"w{number}" for number in range(count)]
    results: dict[str, Any] = {}
    last_came, too_early = threading.Event(), []
    meanwhile: list[tuple[str, bool]] = []

    def work(me: str) -> None:
        if me == workers[-1]:
            last_came.set()
        results[me] = agree(
            me.upper(),
            links=wires.of(me),
            me=me,
            workers=workers,
            label="7/0",
            fan_out=fan_out,
            meanwhile=lambda: meanwhile.append((me, me in results)),
        )
        if not last_came.is_set():
            too_early.append(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert too_early == []
    assert sorted(meanwhile) == sorted((me, False) for me in workers)
    expected = {me: me.upper() for me in workers}
    assert [list(results[me].items()) for me in workers] == [list(expected.items())] * count


@pytest.mark.parametrize("count", [1, 9, 10, 1000])
def test_nobody_talks_to_more_than_the_fan_out_and_one(count: int) -> None:
    workers = [f"w{number}" for number in range(count)]
    places = {me: tree_neighbours(workers, me) for me in workers}
    assert [me for me, (above, _) in places.items() if above is None] == ["w0"]
    for me, (above, below) in places.items():
        assert len(below) <= 8
        assert all(places[worker][0] == me for worker in below)
        assert above is None or me in places[above][1]
