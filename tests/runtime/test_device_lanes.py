"""Communicators between two devices: how they are made. What goes over them needs GPUs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.runtime.comm import nccl
from deepspeed_bamboo.runtime.comm.lane_aborts import LaneAborts


class _Group:
    """Stands for torch's ProcessGroupNCCL, which a torch without GPUs lacks."""

    def __init__(self, store: str, rank: int, size: int, options: Any) -> None:
        self.name, self.rank, self.size, self.options = store, rank, size, options

    class Options:
        """Its own: what nobody sets is as torch has it."""

        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self.config = SimpleNamespace()


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = SimpleNamespace(ProcessGroupNCCL=_Group, PrefixStore=lambda prefix, _store: prefix)
    monkeypatch.setattr(nccl, "c10d", c10d)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)


def lanes_of(*, first: bool) -> nccl.DeviceLanes:
    return nccl.DeviceLanes(
        None, first=first, device=torch.device("cpu"), timeout_seconds=1.0, aborts=LaneAborts(lambda: None)
    )


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("first", [True, False])
def test_sends_and_receives_of_a_worker_share_no_queue_of_its_device(*, first: bool) -> None:
    """Streams of one priority share a device's queues: a receive behind a send there made two workers wait for ever."""
    lanes = lanes_of(first=first)
    out, back = lanes._out, lanes._in
    assert (out.name, back.name) == (("forth", "back") if first else ("back", "forth"))
    assert (out.options.is_high_priority_stream, back.options.is_high_priority_stream) == (True, False)
    assert {group.rank for group in (out, back)} == {0 if first else 1}


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("waiting", ["_in", "_out"])
def test_an_abort_that_waits_for_the_other_direction_holds_that_one_up_no_more(waiting: str) -> None:
    """As one does whose kernel is behind one of the other: each is aborted once, and both come to their end."""
    lanes, other_began, ended = lanes_of(first=True), threading.Event(), queue.Queue[str]()

    def abort_of(name: str) -> Callable[[], None]:
        def abort() -> None:
            if name == waiting:
                other_began.wait(60.0)
            other_began.set()
            ended.put(name)

        return abort

    for name in ("_in", "_out"):
        getattr(lanes, name).abort = abort_of(name)
    lanes.abort()
    lanes.abort()
    assert [ended.get(timeout=30.0), ended.get(timeout=30.0)] == [{"_in": "_out", "_out": "_in"}[waiting], waiting]
    assert lanes.aborted and ended.empty()
