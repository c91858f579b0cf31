"""Several calls of ``eval_batch`` in one step, with ``set_data_source(..., evaluation=...)``, whoever hosts what."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.iteration.evaluation import data_as_others
from deepspeed_bamboo.runtime.iteration.evaluation_position import EvaluationPositions
from deepspeed_bamboo.runtime.iteration.evaluation_source import EvaluationSource
from deepspeed_bamboo.runtime.iteration.feeding import EvaluationData, Feed
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build
from tests.runtime.test_losses import kill

GRID, STEP, COUNT = Grid(2, 2), 9, 2


def endless(*names: Any) -> Iterator[Any]:
    return ((*names, n) for n in itertools.count())


def test_what_a_factory_makes_continues_within_a_step_and_is_read_once() -> None:
    made: list[tuple[int, int]] = []
    read: list[Any] = []

    def factory(pipeline: int, step: int) -> Iterator[Any]:
        made.append((pipeline, step))
        return (read.append(n) or n for n in itertools.count())  # type: ignore[func-returns-value]

    source, got = EvaluationSource(factory), []
    for passed in (0, 2, 4):
        source.begin(passed=passed)
        got += list(itertools.islice(source(1, STEP), 2))
    assert got == read == [0, 1, 2, 3, 4, 5] and made == [(1, STEP)]
    source.begin(passed=8)  # others have read two that this worker did not need
    assert next(source(1, STEP)) == 8 and made == [(1, STEP)]
    source.begin(passed=0)  # another iterator
    assert next(source(1, STEP)) == 0
    assert next(source(1, STEP + 1)) == 0 and next(source(0, STEP + 1)) == 0
    source.end_round()
    assert next(source(0, STEP + 1)) == 0
    assert made == [(1, STEP), (1, STEP), (1, STEP + 1), (0, STEP + 1), (0, STEP + 1)]


def test_one_that_ends_says_so_when_it_is_read() -> None:
    source = EvaluationSource(lambda pipeline, step: iter(range(3)))
    source.begin(passed=4)
    with pytest.raises(StopIteration):
        next(source(0, STEP))


class _HasToldError(Exception):
    pass


class Members:
    """The workers of a job of two pipelines, who agree without messages."""

    def __init__(self, homes: dict[str, int], *, mode: str = "adaptive") -> None:
        self.placement = Placement.initial(GRID, list(homes))
        self.record = SimpleNamespace(members=list(homes), placement=self.placement, waits_seconds=0.0)
        self.told: dict[str, Any] = {}
        self.mode = mode
        self.engines = {name: self._engine(name, home) for name, home in homes.items()}

    def _engine(self, me: str, home: int) -> Any:
        session = SimpleNamespace(config=SimpleNamespace(redundancy=SimpleNamespace(mode=self.mode)))
        worker: Any = SimpleNamespace(
            me=me, session=session, grid=GRID, step=STEP, protects=self.mode != "off", is_reporter=False
        )
        worker.record, worker.placement = self.record, self.placement
        worker.activity = SimpleNamespace(index=0)
        worker.links = SimpleNamespace(meet=lambda others: None, send=lambda *message: None)

        def agree_on(_: str, value: Any) -> dict[str, Any]:
            if me in self.told:
                return self.told
            self.told[me] = value()
            raise _HasToldError

        worker.agree_on = agree_on
        batch: Any = SimpleNamespace()
        feed = Feed(worker, data=PipelineData(home), home=home, transform=lambda: None, batch=batch, used=lambda: 0)
        feed.set_source(lambda pipeline, step: endless(pipeline, "trains"), evaluation=None)
        return SimpleNamespace(worker=worker, feed=feed, evaluated=EvaluationPositions(), batch_fn=None)

    def evaluate(self, iterators: dict[str, Iterator[Any] | None]) -> dict[str, EvaluationData]:
        """What each has for it; all then count it."""
        self.told.clear()
        for name, its in self.engines.items():
            with pytest.raises(_HasToldError):
                data_as_others(its, iterators[name])
        found = {name: data_as_others(its, iterators[name]) for name, its in self.engines.items()}
        for its in found.values():
            its.supply.deliver(micro_batches=COUNT, beforehand=False)
        return found

    def done(self, iterators: dict[str, Iterator[Any] | None], data: dict[str, EvaluationData]) -> None:
        for name, its in self.engines.items():
            data[name].data.complete(COUNT, step=STEP)
            its.evaluated.advance(iterators[name], COUNT)


def read(data: EvaluationData, pipeline: int) -> list[Any]:
    return [data.data.get(pipeline, n, step=STEP) for n in range(COUNT)]


@pytest.mark.parametrize("mode", ["adaptive", "off"])
def test_where_no_iterator_of_a_pipeline_is_left_its_data_continue_as_iterators_do(mode: str) -> None:
    """Two rounds' worth with one iterator, then one with another, then none is passed."""
    job = Members({"w0": 0, "w1": 0}, mode=mode)
    for engine in job.engines.values():
        engine.feed.set_source(endless, evaluation=lambda pipeline, step: endless(pipeline, step))
    one, other = ({name: endless(0, STEP) for name in job.engines} for _ in range(2))
    for iterators, first in ((one, 0), (one, 2), (one, 4), (other, 0), (other, 2), (one, 6)):
        data = job.evaluate(iterators)
        for its in data.values():
            for pipeline in (0, 1):
                assert read(its, pipeline) == [(pipeline, STEP, first), (pipeline, STEP, first + 1)]
        job.done(iterators, data)
    data = job.evaluate(dict.fromkeys(job.engines))
    assert read(data["w0"], 0) == read(data["w1"], 0) == [(0, STEP, 0), (0, STEP, 1)]


def test_a_workers_iterator_feeds_both_ends_of_its_pipeline() -> None:
    """The script may evaluate sets of which the factory knows nothing."""
    job = Members({"w0": 0, "w1": 1, "w2": 0})
    for engine in job.engines.values():
        engine.feed.set_source(endless, evaluation=lambda pipeline, step: endless(pipeline, step))
    iterators = {name: endless("test set", its.feed._home) for name, its in job.engines.items()}
    for first in (0, 2):
        data = job.evaluate(iterators)
        for name, its in data.items():
            home = job.engines[name].feed._home
            assert [its.data.has(pipeline) for pipeline in (0, 1)] == [home == 0, home == 1]
            assert read(its, home) == [("test set", home, first), ("test set", home, first + 1)]
            hosted = {c.pipeline for c in job.placement.hosted_by(name)}
            assert {p for p in (0, 1) if its.supply.has(p)} == hosted - {home}, "others send it"
        job.done(iterators, data)
    data = job.evaluate(iterators)
    job.record.members.remove("w1")  # in this evaluation, which begins again
    for name in ("w0", "w2"):
        data[name].supply.deliver(micro_batches=COUNT, beforehand=False)
        assert not data[name].supply.has(1) and read(data[name], 1) == [(1, STEP, 4), (1, STEP, 5)]


def evaluate_in_rounds(training: Training) -> dict[str, Any]:
    """Before each step three evaluations of one set, and two of another one."""
    engine = build(training)
    home = engine.grid.get_data_parallel_id()

    def batches(pipeline: int, step: int) -> Iterator[Any]:
        return models.micro_batches(models.vectors, pipeline=pipeline, first_step=step, count=training.micro_batches)

    if training.faults is not None:
        engine.set_data_source(batches, evaluation=lambda pipeline, step: batches(pipeline + 100, 10 * step))
    data, losses, evaluations = batches(home, 0), [], []
    for step in range(training.steps):
        one, other = (batches(home + 100, 10 * step) for _ in range(2))
        evaluations.append([float(engine.eval_batch(one)) for _ in range(3)])
        evaluations.append([float(engine.eval_batch(other)) for _ in range(2)])
        losses.append(float(engine.train_batch(data)))
    result = {"losses": losses, "evaluations": evaluations}
    if training.faults is not None:
        engine.close()
    return result


@pytest.mark.sweep
@pytest.mark.parametrize(
    "lost",
    [
        [kill(1, 1, 1, "backward", 1), kill(2, 1, 0, "step")],
        [kill(1, 1, 1, "backward", 1), kill(2, 0, 1, "backward", 1), kill(3, 1, 0, "step")],
    ],
    ids=["one pipeline", "all but one"],
)
def test_rounds_of_evaluations_are_the_same_whoever_is_lost(jobs: Jobs, lost: list[dict[str, Any]]) -> None:
    training = Training(f"rounds-{len(lost)}", 2, steps=5)
    plain = jobs.run(evaluate_in_rounds, world=4, training=training)
    killed = dataclasses.replace(training, name=f"{training.name}-killed", faults=lost)
    result = jobs.run(evaluate_in_rounds, world=4, training=killed)
    assert len(result.survivors) == 4 - len(lost), result.transcript()
    for what in ("losses", "evaluations"):
        assert result.common(what) == plain.common(what)
    assert len({loss for losses in plain.common("evaluations")[::2] for loss in losses}) == 15


@pytest.mark.sweep
def test_rounds_of_evaluations_are_the_same_on_fewer_workers(jobs: Jobs) -> None:
    """One of them has the last stage of a pipeline and the first one of the other."""
    training = Training("rounds-few", 3, steps=2)
    plain = jobs.run(evaluate_in_rounds, world=6, training=training)
    few = dataclasses.replace(training, name="rounds-few-3", faults=[], bamboo={"topology": {"pipelines": 2}})
    result = jobs.run(evaluate_in_rounds, world=3, training=few, environment={"BAMBOO_PIPELINES": "2"})
    for what in ("losses", "evaluations"):
        assert result.common(what) == plain.common(what), result.transcript()
