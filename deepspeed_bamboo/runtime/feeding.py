"""Where the engine gets its micro-batches from. Any worker may need those of a first or last stage after a loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.iteration.micro_batches import DataFactory, PipelineData, check_complete, missing_data
from deepspeed_bamboo.runtime.iteration.supply import DataSupply
from deepspeed_bamboo.runtime.iteration.training_data import data_set_factory
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.job.session import WorkerSession


class BatchOfJob:
    """The size of the job's batch, which a script may change: known alike on all workers.

    Args:
        engine: whose.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._size: int | None = None

    def to_json(self) -> int:
        """What a worker that joins has to know: samples of an iteration, of all pipelines."""
        return int(self._engine.train_batch_size())

    def take(self, value: int) -> None:
        """Inverse of :meth:`to_json`; it counts when :meth:`adopt` is called."""
        self._size = value

    def adopt(self) -> None:
        """Use the job's; a script that counts by itself has set its own on the way."""
        if self._size not in (None, self._engine.train_batch_size()):
            self._engine.set_train_batch_size(self._size)


class FedEngine(PipelineEngine):  # type: ignore[misc]
    """The part of the engine that is given data; see the module."""

    # The engine's; whose they are is said there.
    session: WorkerSession
    data: PipelineData
    evaluation_data: PipelineData | None
    supply: DataSupply
    evaluation_supply: DataSupply | None = None
    home: int
    next_micro_batch: int
    job_grid: Grid
    worker: Worker
    _said_confined = False

    @property
    def protects(self) -> bool:
        """True when this job keeps shadows."""
        return self.worker.protects

    @functools.cached_property
    def batch_of_job(self) -> BatchOfJob:
        """Its size, for workers that join."""
        return BatchOfJob(self)

    def micro_batches_used(self, *, since: int) -> int:
        """How many each pipeline has used since step ``since``, at which the script's iterators began."""
        if since:
            return int((self.worker.step - since) * self.micro_batches)
        return int(self.global_samples // (self.micro_batch_size * self.job_grid.pipelines))

    def set_dataloader(self, loader: Any) -> None:
        """Every worker keeps its own copy of the data position, since it may inherit the first or last stage."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)
        self.data.set_iterator(self.data_iterator)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`set_dataloader`."""
        self.training_dataloader = None
        self.data.set_iterator(iterator)
        self.data_iterator = iterator

    def set_data_source(self, training: DataFactory, *, evaluation: DataFactory | None = None) -> None:
        """Say where the data of any pipeline come from, for when this worker hosts stages of another pipeline.

        ``training(pipeline, step)`` returns an iterator over that pipeline's micro-batches from ``step`` on,
        ``evaluation`` the same for ``eval_batch``. Call it on every rank, before training; iterators passed to
        ``train_batch`` are still used for this worker's first pipeline. ``training_data`` needs none of this.
        """
        self.data.set_factory(training)
        self._evaluation_factory = evaluation

    def _next_batch(self) -> Any:
        active = self.host.active
        if active is None:
            raise RuntimeError("no stage is active")
        pipeline = active.coordinate.pipeline
        evaluates = self.evaluation_data is not None
        data = self.data if self.evaluation_data is None else self.evaluation_data
        supply = self.supply if self.evaluation_supply is None else self.evaluation_supply
        if not data.has(pipeline) and supply.has(pipeline):
            return supply.take(pipeline, self.next_micro_batch)
        if not data.has(pipeline) and (self.is_first_stage() or pipeline != self.home):
            raise missing_data(
                worker=self.session.worker, pipeline=pipeline, home=self.home, why=f"hosts {active.coordinate}"
            )
        batch = data.get(pipeline, self.next_micro_batch, step=self.global_steps, transform=self.batch_fn)
        if not evaluates and self.protects:
            check_complete(batch, worker=self.session.worker)
        return batch

    def has_read(self, pipeline: int, micro_batch: int) -> bool:
        """Whether loading ``micro_batch`` runs nothing of the user's: another stage has loaded it already."""
        data = self.data if self.evaluation_data is None else self.evaluation_data
        return data.has(pipeline) and data.has_read(pipeline, micro_batch, step=self.global_steps)

    @property
    def confined(self) -> bool:
        """True where a worker has the data of its own pipeline only: nobody else can do its first and last stages."""
        return self.job_grid.pipelines > 1 and not self.data.covers_every_pipeline

    def _warn_if_confined(self) -> None:
        """Say once, before the first step, what a script with several pipelines has to tell for all of it to work."""
        if not self._said_confined and self.protects and self.confined:
            memory = " no memory checkpoints are kept," if self.worker.session.config.remembers else ""
            tell_once(
                self.worker,
                f"with {self.job_grid.pipelines} pipelines, and data from iterators alone, a lost worker's first or "
                f"last stage can be taken over only in its own pipeline,{memory} and nobody can join: call "
                "engine.set_data_source(lambda pipeline, step: iterator) on every rank before training, or pass "
                "training_data to initialize",
            )
        self._said_confined = True

    def complete_data(self) -> None:
        """Pull what others need of this iteration's data. Before the step: an iterator may look at the global step."""
        if self.protects:
            self.data.complete(self.micro_batches, step=self.global_steps, transform=self.batch_fn)

    def _build_data_iter(self, dataset: Any) -> None:
        super()._build_data_iter(dataset)
        self._training_set = dataset

    def _place_data(self) -> None:
        """Tell what the user gave to ``initialize`` from what belongs to one pipeline only."""
        given, self.data = self.data, PipelineData(self.home)
        if self._training_set is not None:
            self.data.set_factory(data_set_factory(self, self._training_set))
        else:
            self.data.set_iterator(given.iterator)
