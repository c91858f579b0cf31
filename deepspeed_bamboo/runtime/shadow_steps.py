"""Lets a shadow take its optimizer's step on a stream of its own, beside the next iteration's first forwards.

Owner and shadow apply the same update, so without this a worker's device would do two of them in a row, in which
the pipeline stands still. After the step the pipeline fills, and most devices wait anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.runtime.replica import StageReplica


class ShadowSteps:
    """The side stream of one worker. On a CPU everything here does nothing.

    Only for DeepSpeed's BF16 optimizer, whose gradients stay where they are: others free theirs in the step, and
    the memory would go to the main stream while the side stream still reads it.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None

    @property
    def active(self) -> bool:
        """True where there is a side stream."""
        return self._stream is not None

    def covers(self, replica: StageReplica) -> bool:
        """True for a replica whose step may run beside the main stream."""
        return self._stream is not None and type(replica.attributes["optimizer"]) is BF16_Optimizer

    @contextmanager
    def beside(self, replica: StageReplica) -> Iterator[None]:
        """What is launched inside the block, by this thread, for a shadow, goes to the side stream."""
        if not self.covers(replica):
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def follow(self, answer: torch.Tensor | None) -> None:
        """What the side stream gets from now on comes after what the main stream has so far, ``answer`` included."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if answer is not None and answer.is_cuda:
            answer.record_stream(self._stream)

    def lead(self) -> None:
        """What the main stream gets from now on comes after what the side stream has so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def finish(self, replica: StageReplica) -> None:
        """The step of ``replica`` is launched: whoever uses the replica next waits for it, see ``settle``."""
        if self._stream is not None and self.covers(replica):
            replica.stepping = self._stream.record_event()
