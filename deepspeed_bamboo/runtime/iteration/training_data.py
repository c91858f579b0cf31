"""A data set given to ``initialize(training_data=...)``, readable from any global step and for any pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from deepspeed.runtime.dataloader import RepeatingLoader

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.iteration.micro_batches import DataFactory
from deepspeed_bamboo.runtime.iteration.worker import Worker


class LoadingEngine(Protocol):
    """What is read of an engine to make loaders as it does."""

    job_grid: Grid
    micro_batches: int
    micro_batch_size: int
    global_samples: int
    worker: Worker

    def deepspeed_io(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's loader over a data set."""


class PositionedSampler(torch.utils.data.Sampler[int]):
    """``sampler`` without its first ``skipped`` samples in the first pass; whole in every later one."""

    def __init__(self, sampler: Any, *, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        for position, index in enumerate(self._sampler):
            if position >= skipped:
                yield index


def data_set_factory(engine: LoadingEngine, dataset: Any) -> DataFactory:
    """Iterators over ``dataset``: the samples, in the order, that DeepSpeed's own engine gives each pipeline."""

    # As it is while the engine is built: scripts replace it around ``initialize`` to choose loader workers.
    loader_for = engine.deepspeed_io

    def make(pipeline: int, step: int) -> Iterator[Any]:
        def loader(skipped: int) -> Any:
            sampler: Any = torch.utils.data.distributed.DistributedSampler(
                dataset, num_replicas=engine.job_grid.pipelines, rank=pipeline, shuffle=False
            )
            return loader_for(dataset, data_sampler=PositionedSampler(sampler, skipped=skipped))

        whole_pass = len(loader(0))
        micro_batch = _micro_batches_before(engine, step) % whole_pass
        return iter(RepeatingLoader(loader(micro_batch * engine.micro_batch_size)))

    return make


def _micro_batches_before(engine: LoadingEngine, step: int) -> int:
    """How many each pipeline has read before ``step``; their number may have changed in between."""
    if step == engine.worker.step:
        return int(engine.global_samples) // (engine.micro_batch_size * engine.job_grid.pipelines)
    return step * engine.micro_batches
