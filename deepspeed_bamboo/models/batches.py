"""Micro-batches by global step: step k trains on samples [kB, (k+1)B), however many workers there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

# A tensor, or a tuple of tensors, for the first layer; labels for the loss.
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class BatchShape:
    """How a global batch of B samples is cut up."""

    micro_batch_size: int
    micro_batches: int  # per step and pipeline
    pipelines: int = 1

    @property
    def samples(self) -> int:
        """B, the samples of one step over all pipelines."""
        return self.micro_batch_size * self.micro_batches * self.pipelines

    def indices(self, *, step: int, pipeline: int, micro_batch: int) -> range:
        """The samples of one micro-batch. Pipelines take turns, as with DeepSpeed's own sampler."""
        first = step * self.samples + micro_batch * self.micro_batch_size * self.pipelines + pipeline
        return range(first, first + self.micro_batch_size * self.pipelines, self.pipelines)


class StepBatches(Iterator[Batch]):
    """An iterator for ``engine.train_batch`` whose position follows the engine's step.

    It asks ``current_step`` at every ``next``: in a new step it starts at that step's first micro-batch.
    So it is where it should be on a worker that joined late, and on one that takes the data over in
    the middle of a step, without having been advanced there. ``batch_at`` gives any batch directly.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        shape: BatchShape,
        current_step: Callable[[], int],
        pipeline: int = 0,
        threads: int = 0,
    ) -> None:
        """``threads`` prepare the next micro-batches; 0: each is made when the engine asks for it."""
        self._dataset = dataset
        self._shape = shape
        self._current_step = current_step
        self._pipeline = pipeline
        self._step = -1
        self._next_micro_batch = 0
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="samples") if threads else None
        self._beforehand: dict[tuple[int, int], Future[Batch]] = {}

    def __next__(self) -> Batch:
        """The next micro-batch of the current step. Raises StopIteration when the step has no more."""
        step = self._current_step()
        if step != self._step:
            self._step, self._next_micro_batch = step, 0
        if self._next_micro_batch == self._shape.micro_batches:
            raise StopIteration
        micro_batch = self._next_micro_batch
        self._next_micro_batch += 1
        if self._pool is None:
            return self.batch_at(step=step, pipeline=self._pipeline, micro_batch=micro_batch)
        return self._made_beforehand(self._pool, step, micro_batch)

    def _made_beforehand(self, pool: ThreadPoolExecutor, step: int, micro_batch: int) -> Batch:
        """The micro-batch; what comes next is being made then. What nobody asked for after all is forgotten."""
        first = step * self._shape.micro_batches + micro_batch
        wanted = [divmod(first + ahead, self._shape.micro_batches) for ahead in range(self._threads + 1)]
        known = self._beforehand
        self._beforehand = {
            key: known.get(key) or pool.submit(self.batch_at, step=key[0], pipeline=self._pipeline, micro_batch=key[1])
            for key in wanted
        }
        return self._beforehand.pop(wanted[0]).result()

    def batch_at(self, *, step: int, pipeline: int, micro_batch: int) -> Batch:
        """Inputs and labels of one micro-batch, samples stacked; moves nothing."""
        indices = self._shape.indices(step=step, pipeline=pipeline, micro_batch=micro_batch)
        samples: list[Any] = [self._dataset[index] for index in indices]
        inputs, labels = zip(*samples, strict=True)
        return stacked(inputs), stacked(labels)


def stacked(samples: Sequence[Any]) -> Any:
    """Tensors with a dimension more in front; of tuples a tuple of such."""
    if isinstance(samples[0], Tensor):
        return torch.stack(list(samples))
    return tuple(stacked(parts) for parts in zip(*samples, strict=True))
