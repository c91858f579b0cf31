"""Decides which redundant forwards a worker really does, and where they keep what their backward would need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_bamboo.config.section import RedundancyConfig
from deepspeed_bamboo.runtime.iteration.bubbles import Bubbles
from deepspeed_bamboo.runtime.iteration.offload import HostOffload
from deepspeed_bamboo.runtime.iteration.recompute import keep_only_input
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class RedundantForwards:
    """The redundant forwards of one worker.

    Args:
        settings: the configuration's ``redundancy``.
        device: the worker's device.
    """

    def __init__(self, settings: RedundancyConfig, *, device: torch.device) -> None:
        self._settings = settings
        on_device = device.type == "cuda"
        self.bubbles = Bubbles(_mark if on_device else None)
        limit = settings.memory_limit_gigabytes
        self.host_offload = HostOffload(device=device, limit_bytes=None if limit is None else int(limit * 2**30))

    @property
    def optional(self) -> bool:
        """True where those that fit into no bubble are left out."""
        return self._settings.mode != "full" and not self._settings.overlap

    def due(self, replica: StageReplica, micro_batch: int) -> int | None:
        """The micro-batch to do where the program has the redundant forward of ``micro_batch``; None: none now.

        Where they are optional and what they keep goes to the host, the last stage's are left out, which keeps the most
        by far (a value for each word of the vocabulary; until they are copied they take more of the device than its
        state). Nor is one done while an earlier one's are still being copied: links to the host are slow, and the
        copies would pile up. The next one then does the oldest that is left, so that those done are always the first.
        """
        settings = self._settings
        copies = settings.offload == "cpu" and self.host_offload.copies
        if self.optional and copies and (_is_last(replica) or self.host_offload.busy):
            return None
        return min(replica.progress.forwards, micro_batch)

    def run(self, replica: StageReplica, micro_batch: int, forward: Callable[[], None]) -> None:
        """Do ``forward`` of the active ``replica``. Raises MemoryLimitError when it would keep too much on the host."""
        if self._settings.offload == "recompute":
            keep_only_input(replica, micro_batch, forward)
        elif self._settings.offload == "cpu":
            with self.host_offload.offloading(replica.module):
                forward()
        else:
            forward()


def _mark() -> Any:
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_last(replica: StageReplica) -> bool:
    stages: int = replica.attributes["grid"].pipe_parallel_size
    return replica.coordinate.stage == stages - 1
