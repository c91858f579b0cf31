"""Lets a shadow take its optimizer's step on a stream of its own, beside the next iteration's first forwards.

Owner and shadow apply the same update, so without this a worker's device would do two of them in a row, in which
the pipeline stands still. After the step the pipeline fills, and most devices wait anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_bamboo.runtime.stock.patches.norm_on_host import asks_for_the_norm, without_norm
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class LateStep:
    """A shadow's step whose launching would hold up the next iteration's first forward.

    Stands where a replica keeps the event at the end of a step on another stream, see ``StageReplica.finish_step``.
    """

    def __init__(self, replica: StageReplica, launch: Callable[[], None]) -> None:
        self._replica = replica
        self._launch = launch

    def launch(self) -> None:
        """Launch it now. It leaves the event at its end, or nothing, in its own place."""
        self._replica.stepping = None
        self._launch()

    def wait(self, stream: Any) -> None:
        """Launch it, and let ``stream`` wait for its end."""
        self.launch()
        stepping, self._replica.stepping = self._replica.stepping, None
        if stepping is not None:
            stepping.wait(stream)


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
        """The step of a shadow: what the block launches, in this thread, goes to the side stream.

        Its part of the gradients' norm is left out. The owner's is what counts, and a kernel or two for every
        parameter would hold up the agreement.
        """
        with ExitStack() as stack:
            if self.covers(replica):
                stack.enter_context(torch.cuda.stream(self._stream))
            if asks_for_the_norm(replica):
                stack.enter_context(without_norm(replica.attributes["optimizer"]))
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

    def can_wait(self, replica: StageReplica) -> bool:
        """True for a replica whose step has just one collective, the norm, to which it contributes nothing.

        With several pipelines each has a part of the optimizer, and their parameters are gathered.
        """
        alone = replica.attributes["grid"].data_parallel_size == 1
        return alone and self.covers(replica) and asks_for_the_norm(replica)

    def finish(self, replica: StageReplica) -> None:
        """The step of ``replica`` is launched: whoever uses the replica next waits for it, see ``settle``."""
        if self._stream is not None and self.covers(replica):
            replica.stepping = self._stream.record_event()
