"""Communicators between two devices: how they are made. What goes over them needs GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.runtime.comm import nccl


class _Group:
    """Stands for torch's ProcessGroupNCCL, which a torch without GPUs lacks."""

    def __init__(self, store: str, rank: int, size: int, options: Any) -> None:
        self.name, self.rank, self.size, self.options = store, rank, size, options

    class Options:
        """Its own: what nobody sets is as torch has it."""

        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self.config = SimpleNamespace()


@pytest.mark.parametrize("first", [True, False])
def test_sends_and_receives_of_a_worker_share_no_queue_of_its_device(
    monkeypatch: pytest.MonkeyPatch, *, first: bool
) -> None:
    """Streams of one priority share a device's queues: a receive behind a send there made two workers wait for ever."""
    c10d = SimpleNamespace(ProcessGroupNCCL=_Group, PrefixStore=lambda prefix, _store: prefix)
    monkeypatch.setattr(nccl, "c10d", c10d)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    lanes = nccl.DeviceLanes(None, first=first, device=torch.device("cpu"), timeout_seconds=1.0)
    out, back = lanes._out, lanes._in
    assert (out.name, back.name) == (("forth", "back") if first else ("back", "forth"))
    assert (out.options.is_high_priority_stream, back.options.is_high_priority_stream) == (True, False)
    assert {group.rank for group in (out, back)} == {0 if first else 1}
