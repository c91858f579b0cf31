"""Where a worker gets its micro-batches from. Any worker may need those of a first or last stage after a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.batch_function import BatchFunction
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.evaluation_source import EvaluationSource
from deepspeed_bamboo.runtime.iteration.micro_batches import (
    DataFactory,
    PipelineData,
    Transform,
    check_complete,
    missing_data,
)
from deepspeed_bamboo.runtime.iteration.supply import DataSupply
from deepspeed_bamboo.runtime.iteration.training_data import TrainingData
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once


@dataclass(frozen=True)
class EvaluationData:
    """What an evaluation reads: its own data, and what other workers send of theirs."""

    data: PipelineData
    supply: DataSupply


class Feed:
    """One worker's micro-batches, see the module.

    Args:
        worker: whose stages need them.
        data: the script's, for training.
        home: the pipeline whose iterators this worker's script passes.
        transform: returns what the script has the engine do to each batch, or None.
        batch: the size of the job's batch.
        used: returns how many micro-batches each pipeline has used since the job began, by the count of samples.
        call_of: the number of the script's call of ``train_batch`` that trains a step.
        exchanges: returns whether the script has sent or received messages between ranks.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        data: PipelineData,
        home: int,
        transform: Callable[[], Transform],
        batch: BatchOfJob,
        used: Callable[[], int],
        call_of: Callable[[int], int] = int,
        exchanges: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker = worker
        self._home = home
        self._script_transform = transform
        self.function = BatchFunction(worker)
        self._batch = batch
        self._used = used
        self._call_of = call_of
        self._evaluation: EvaluationData | None = None
        self._evaluation_source: EvaluationSource | None = None
        self._training: TrainingData | None = None
        self._said_confined = False
        self.said_of_evaluations: set[tuple[int, int]] = set()
        self.had_for_evaluations: dict[int, frozenset[str]] = {}
        self.data = data
        self.supply = DataSupply(worker, data=lambda: data, transform=self._transform, exchanges=exchanges)
        self.next_micro_batch = 0

    def set_training_data(self, training: TrainingData) -> None:
        """The script has given a data set to ``initialize``."""
        self._training = training
        self.data.set_factory(training.first, for_last=(training.last, training.parted))

    def set_source(self, training: DataFactory, *, evaluation: DataFactory | None) -> None:
        """Where the data of any pipeline come from, see the engine's ``set_data_source``."""
        self.data.set_factory(training)
        self._training = None
        self._evaluation_source = None if evaluation is None else EvaluationSource(evaluation)

    def _transform(self) -> Transform:
        its = self._script_transform()
        return self.function.watched(its) if self.data.covers_every_pipeline else its

    def agree(self) -> None:
        """Before an iteration: know what the others have, as :class:`DataSupply` does; collective."""
        self.function.refuse_moving()
        if self._evaluation_source is not None:
            self._evaluation_source.end_round()
        self._batch.note(self._call_of(self._worker.step), micro_batches=self._worker.micro_batches)
        self.supply.agree()

    def used(self, *, since: int) -> int:
        """How many micro-batches each pipeline has used since call ``since``, at which the script's iterators began."""
        call = self._call_of(self._worker.step)
        known = self._batch.counts.total(since, until=call)
        if known is not None:
            return known
        return (call - since) * self._worker.micro_batches if since else self._used()

    # -- evaluation --------------------------------------------------------------------------------

    @property
    def evaluation(self) -> EvaluationData | None:
        """What the evaluation in progress reads; None while there is none."""
        return self._evaluation

    def for_evaluation(self, iterator: Iterator[Any] | None) -> PipelineData:
        """The data of an evaluation whose script passes ``iterator``."""
        data = PipelineData(self._home)
        data.set_iterator(iterator)
        data.set_factory(self._evaluation_source)
        return data

    def begin_evaluation(self, *, passed: int) -> None:
        """The iterators for the evaluation that begins have given so many micro-batches in this step already."""
        if self._evaluation_source is not None:
            self._evaluation_source.begin(passed=passed)

    @contextmanager
    def reading(self, evaluation: EvaluationData | None) -> Iterator[None]:
        """Inside, micro-batches are those of ``evaluation``; None: of training."""
        before, self._evaluation = self._evaluation, evaluation
        try:
            yield
        finally:
            self._evaluation = before

    # -- in an iteration ---------------------------------------------------------------------------

    def next_batch(self) -> Any:
        """Micro-batch :attr:`next_micro_batch` of the active stage's pipeline.

        Raises ConfigError where nobody has it, and what the script's iterator raises.
        """
        worker, active = self._worker, self._worker.host.active
        if active is None:
            raise RuntimeError("no stage is active")
        pipeline, evaluation = active.coordinate.pipeline, self._evaluation
        data, supply = (self.data, self.supply) if evaluation is None else (evaluation.data, evaluation.supply)
        if not data.has(pipeline) and supply.has(pipeline):
            return supply.take(pipeline, self.next_micro_batch)
        if not data.has(pipeline) and (active.coordinate.stage == 0 or pipeline != self._home):
            raise missing_data(worker=worker.me, pipeline=pipeline, home=self._home, why=f"hosts {active.coordinate}")
        last = active.coordinate.stage > 0
        batch = data.get(pipeline, self.next_micro_batch, step=worker.step, transform=self._transform(), last=last)
        if evaluation is None and worker.protects:
            check_complete(batch, worker=worker.me)
        return batch

    def has_read(self, coordinate: Coordinate, micro_batch: int) -> bool:
        """Whether loading ``micro_batch`` runs nothing of the user's: another stage has loaded it already."""
        data = self.data if self._evaluation is None else self._evaluation.data
        pipeline, last = coordinate.pipeline, coordinate.stage > 0
        return data.has(pipeline) and data.has_read(pipeline, micro_batch, step=self._worker.step, last=last)

    def complete(self) -> None:
        """Pull what others need of this iteration's data. Before the step: an iterator may look at the global step."""
        worker = self._worker
        complete = self.data.complete if worker.protects else self.data.complete_made
        if worker.protects and self._training is not None:
            self._read_along(self._training)
        complete(worker.micro_batches, step=worker.step, transform=self._transform())

    def _read_along(self, training: TrainingData) -> None:
        """Be ready to take over the ends of pipelines that this worker shadows."""
        worker, last_stage = self._worker, self._worker.grid.stages - 1
        shadows = sorted(c for c in worker.host.shadows if c.stage in (0, last_stage))
        training.read_no_others((c.pipeline, c.stage > 0) for c in shadows)
        for coordinate in shadows:
            last = coordinate.stage > 0
            if not self.data.reads(coordinate.pipeline, step=worker.step, last=last):
                training.read_along(coordinate.pipeline, last=last)

    # -- data of one pipeline only -----------------------------------------------------------------

    @property
    def confined(self) -> bool:
        """True where a worker has the data of its own pipeline only: nobody else can do its first and last stages."""
        return self._worker.grid.pipelines > 1 and not self.data.covers_every_pipeline

    def warn_if_confined(self) -> None:
        """Say once, before the first step, what a script with several pipelines has to tell for all of it to work."""
        worker = self._worker
        if not self._said_confined and worker.protects and self.confined:
            memory = " no memory checkpoints are kept," if worker.session.config.remembers else ""
            tell_once(
                worker,
                f"with {worker.grid.pipelines} pipelines, and data from iterators alone, a lost worker's first or "
                f"last stage can be taken over only in its own pipeline,{memory} and nobody can join: call "
                "engine.set_data_source(lambda pipeline, step: iterator) on every rank before training, or pass "
                "training_data to initialize",
            )
        self._said_confined = True
