"""Nothing new goes over lanes while NCCL gives others up: it would hold up both sides' sends for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.coordination import Member
from deepspeed_bamboo.errors import ExpelledError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.lane_aborts import LaneAborts
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.comm.store_server import StoreServer

SECRET = "0123456789abcdef"
NAMES = ("w0", "w1")


def wait_for(event: threading.Event) -> None:
    event.wait(60.0)


def test_a_wait_ends_with_the_last_abort() -> None:
    ends, noticed = [threading.Event(), threading.Event()], threading.Semaphore(0)
    aborts = LaneAborts(noticed.release)
    assert not aborts.pending
    for end in ends:
        aborts.start(lambda end=end: wait_for(end))  # type: ignore[misc]
    waited = threading.Event()

    def wait() -> None:
        aborts.wait()
        waited.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    ends[1].set()
    assert noticed.acquire(timeout=30.0)
    assert aborts.pending and not waited.is_set()
    ends[0].set()
    waiting.join(30.0)
    assert waited.is_set() and not aborts.pending and noticed.acquire(timeout=30.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_abort_that_fails_has_ended() -> None:
    aborts = LaneAborts(lambda: None)

    def fail() -> None:
        raise RuntimeError("NCCL can not")

    aborts.start(fail)
    aborts.wait()
    assert not aborts.pending


def test_a_line_says_when_nccl_does_not_come_to_an_end(caplog: pytest.LogCaptureFixture) -> None:
    end = threading.Event()
    aborts = LaneAborts(lambda: None, patience_seconds=0.0)
    aborts.start(lambda: wait_for(end))
    with caplog.at_level(logging.WARNING):
        aborts.wait()
    assert "giving up 1 communicators" in caplog.text and aborts.pending
    end.set()


@contextmanager
def two_workers(interruption: Interruption) -> Iterator[tuple[Links, Links]]:
    """Linked in epoch 0; ``interruption`` is the first one's."""
    servers = {name: StoreServer("127.0.0.1", secret=SECRET) for name in NAMES}
    members = {n: Member(n, n, "z", "127.0.0.1", servers[n].port, 0, 0) for n in NAMES}
    links = [
        Links(
            n, interruption=waits, timeout_seconds=20, device=torch.device("cpu"), secret=SECRET, own_store=servers[n]
        )
        for n, waits in zip(NAMES, (interruption, Interruption()), strict=True)
    ]
    for one in links:
        one.enter(members=members, order=NAMES, name="epoch 0")
    try:
        yield links[0], links[1]
    finally:
        for one in links:
            one.close()
        for server in servers.values():
            server.close()


def connecting(links: Links, peer: str, failures: list[BaseException]) -> threading.Thread:
    def connect() -> None:
        try:
            links.connect([peer])
        except ExpelledError as error:
            failures.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


def test_a_worker_has_links_only_when_nccl_has_given_up_the_lanes_of_before() -> None:
    failures: list[BaseException] = []
    given_up = threading.Event()
    with two_workers(Interruption()) as (one, other):
        one._aborts.start(lambda: wait_for(given_up))
        held, free = connecting(one, "w1", failures), connecting(other, "w0", failures)
        free.join(30.0)
        assert not free.is_alive() and held.is_alive() and not failures
        given_up.set()
        held.join(30.0)
        assert not held.is_alive()
        one.send("w1", Message("hello"))
        assert other.receive("w0", "hello").key == "hello"


def test_what_ends_a_workers_waits_ends_this_one() -> None:
    failures: list[BaseException] = []
    given_up, interruption = threading.Event(), Interruption()
    with two_workers(interruption) as (one, other):
        one._aborts.start(lambda: wait_for(given_up))
        held, free = connecting(one, "w1", failures), connecting(other, "w0", failures)
        free.join(30.0)
        interruption.announce_expulsion("it was silent")
        held.join(30.0)
        given_up.set()
        assert not held.is_alive()
        assert [type(failure) for failure in failures] == [ExpelledError]


class _Lanes:
    """Stands for the lanes to a peer."""

    def __init__(self, log: list[str], build: Callable[[], None]) -> None:
        build()
        self._log = log

    def open(self) -> None:
        self._log.append("open")

    def abort(self) -> None:
        self._log.append("abort")


def test_lanes_that_are_made_after_the_wait_has_ended_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ended the wait aborts those that it knows; these came in the moment after it had looked."""
    log: list[str] = []
    over = SimpleNamespace(ended=False)
    made: Any = lambda *_args, **_kwargs: _Lanes(log, lambda: setattr(over, "ended", True))  # noqa: E731
    monkeypatch.setattr("deepspeed_bamboo.runtime.comm.peers.DeviceLanes", made)
    with two_workers(Interruption()) as (one, _other), pytest.raises(RuntimeError, match="nobody waits"):
        one._open_lanes("w1", {}, ended=lambda: over.ended)
    assert log == ["abort"]
