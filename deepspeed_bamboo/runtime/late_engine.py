"""The engine of a worker that comes to a running job: its script begins at step 0, the job is far beyond.

The job hears of the worker only when the script has done whatever it does first, reading its data for example: once
it is a member everybody waits for it. That is when the script asks for ``global_steps``, by which its loop then goes,
or, in a script that counts by itself, when it has called ``train_batch`` as often as the job has trained. Until
then ``train_batch`` returns at once, and so does all that the others did before this worker came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.engine import BambooPipelineEngine
from deepspeed_bamboo.runtime.joining import check_grid, join
from deepspeed_bamboo.runtime.news import tell

# Up to here the job is caught up with while it goes on; the rest of the way it waits for this worker.
_NEAR_STEPS = 3
_MOST_LOOKS = 10


class _Phase(Enum):
    OUTSIDE = "outside"  # the job does not know of this worker
    CATCHING_UP = "catching up"  # a member, but the script has not come to the job's step
    INSIDE = "inside"


class LateEngine(BambooPipelineEngine):
    """See the module."""

    _phase = _Phase.INSIDE  # while stock builds the engine

    def _begin(self, grid: Grid) -> None:
        check_grid(self, grid)
        self._phase = _Phase.OUTSIDE
        self._calls = 0  # of train_batch, by a script that counts by itself
        self._looks = 0
        self._reached = 0  # the job's step, as last heard of
        self._loss = math.nan  # its loss there

    @property
    def global_steps(self) -> int:
        """The job's iterations; asking for it first is what takes this worker into the job."""
        if self._phase is _Phase.OUTSIDE and not self._calls:
            self._join(counts_by_itself=False)
        return int(self._calls if self._phase is not _Phase.INSIDE else self.__dict__["global_steps"])

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.__dict__["global_steps"] = count

    @property
    def catching_up(self) -> bool:  # type: ignore[override]
        """True while the script has yet to come to the job's step."""
        return self._phase is _Phase.CATCHING_UP

    def _join(self, *, counts_by_itself: bool) -> None:
        self._phase = _Phase.INSIDE
        join(self)
        self._reached = self.global_steps
        if counts_by_itself and self._calls < self._reached:
            self._phase = _Phase.CATCHING_UP

    def _is_before_its_time(self) -> bool:
        """Whether this call of ``train_batch`` stands for an iteration that the others did before."""
        if self._phase is _Phase.OUTSIDE and self._calls >= self._reached:
            self._look()
            if self._calls >= self._reached:
                self._join(counts_by_itself=True)
        if self._phase is _Phase.CATCHING_UP and self._calls >= self._reached:
            self._phase = _Phase.INSIDE
        return self._phase is not _Phase.INSIDE

    def _look(self) -> None:
        """Where the job is now; nowhere new when this worker is so near, or so slow, that it had better join."""
        status = self.session.coordinator.status() or {}
        step = int(status.get("step", -1)) + 1
        self._loss = float(status.get("loss", math.nan))
        self._looks += 1
        if step - self._calls > _NEAR_STEPS and self._looks <= _MOST_LOOKS:
            if self._looks == 1:
                tell(self, f"this worker joins a job at step {step}: train_batch returns at once for those before")
            self._reached = step

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """As stock's, and surviving losses; the job's last known loss for an iteration before this worker's time."""
        if self._is_before_its_time():
            self._calls += 1
            return torch.tensor(self._loss, device=self.device)
        return super().train_batch(data_iter)

    def eval_batch(self, data_iter: Iterator[Any] | None, return_logits: bool = False, **arguments: Any) -> Any:  # type: ignore[override]
        """As stock's; not a number where the others evaluated before this worker came."""
        if self._phase is _Phase.INSIDE:
            return super().eval_batch(data_iter, return_logits, **arguments)
        if data_iter is not None:
            # One iterator may serve all evaluations; the others' has gone on.
            deque(islice(data_iter, arguments.get("num_micro_batches") or self.micro_batches), maxlen=0)
        loss = torch.tensor(math.nan, device=self.device)
        return (loss, None) if return_logits else loss

    def barrier(self) -> None:
        """Wait for the others, unless they have been here before."""
        if self._phase is _Phase.INSIDE:
            super().barrier()

    def state_digest(self) -> str:
        """As on the others; empty where they computed it before this worker came."""
        return super().state_digest() if self._phase is _Phase.INSIDE else ""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """As stock's; nothing where the others saved one before: this worker's state is not the job's yet."""
        return super().save_checkpoint(*arguments, **options) if self._phase is _Phase.INSIDE else True

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """(None, None), as where there is no checkpoint: a late worker's state comes from the others."""
        return super().load_checkpoint(*arguments, **options) if self._phase is _Phase.INSIDE else (None, None)

    def perform(self, kind: str, body: Callable[[], None]) -> None:
        """As on the others, once this worker is one of them."""
        if self._phase is _Phase.OUTSIDE:
            self._join(counts_by_itself=False)
        super().perform(kind, body)

    def close(self) -> None:
        """As on the others; a script that ends before it came to the job's step just leaves."""
        if self._phase is _Phase.OUTSIDE:
            self.leave()
        else:
            super().close()
