"""Samples that draw random numbers are stock's, wherever reading begins (``training_data``)."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from deepspeed.runtime.dataloader import RepeatingLoader

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.for_scripts import ScriptEngine
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.data_streams import DataStreams, states_from_text, states_now, states_to_text
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.iteration.training_data import TrainingData
from deepspeed_bamboo.runtime.iteration.watched_samples import WatchedSamples

MICRO_BATCHES = 3


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Ten samples or more; from sample ``since`` on they draw from torch, Python and numpy."""

    def __init__(self, since: int = 0, *, length: int = 10) -> None:
        self.since = since
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index < self.since:
            return torch.tensor(float(index))
        return index + torch.rand(()) + random.random() + float(numpy.random.rand())


class WithGenerator(torch.utils.data.Dataset[torch.Tensor]):
    """Ten samples that draw from a generator of the data set."""

    def __init__(self) -> None:
        self.parts = {"generator": numpy.random.default_rng(7)}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index + self.parts["generator"].random())


@dataclass
class Loading:
    """As much of an engine as reads data: with ``helpers`` processes."""

    helpers: int
    job_grid: Grid = field(default_factory=lambda: Grid(1, 2))
    micro_batches: int = MICRO_BATCHES
    micro_batch_size: int = 2
    global_samples: int = 0
    worker: Any = None

    def deepspeed_io(self, dataset: Any, data_sampler: Any) -> Any:
        return torch.utils.data.DataLoader(
            dataset, batch_size=self.micro_batch_size, sampler=data_sampler, num_workers=self.helpers
        )


def begun(engine: Loading, streams: DataStreams) -> None:
    """What stock does in ``initialize``: the iterator of the first pass, here of both ends of the pipeline."""
    streams.begin()
    torch.empty((), dtype=torch.int64).random_()
    claims = {"a": streams.claim(), "b": streams.claim()}
    streams.learn(claims, placement=Placement.initial(engine.job_grid, ("a", "b")))


def stock(dataset: Any, *, helpers: int, count: int) -> list[torch.Tensor]:
    sampler: Any = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=helpers)
    return list(itertools.islice(RepeatingLoader(loader), count))


def seed() -> None:
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("make", [Drawing, lambda: Drawing(since=7), WithGenerator])
def test_reading_begins_anywhere(make: Any, helpers: int) -> None:
    """From each step on the same micro-batches as stock's, over three passes; whoever reads leaves no trace."""
    seed()
    expected = stock(make(), helpers=helpers, count=15)
    seed()
    engine, streams = Loading(helpers), DataStreams()
    data = TrainingData(engine, make(), streams=streams)
    begun(engine, streams)
    engine.worker = SimpleNamespace(step=0, session=SimpleNamespace(works=SilentWorks()))
    before = states_to_text(states_now())
    reader = data.first(0, 0)
    for step in range(5):
        engine.worker.step, engine.global_samples = step, step * MICRO_BATCHES * 2
        other = TrainingData(engine, make(), streams=streams)
        streams.noticed = lambda: data._samples.draw
        begin, end = step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES
        for one in (reader, other.last(0, step)):
            for read, wanted in zip(itertools.islice(one, MICRO_BATCHES), expected[begin:end], strict=True):
                assert torch.equal(read, wanted)
        streams.draws = streams.draws or bool(streams.contribution())
    assert streams.draws
    assert states_to_text(states_now()) == before


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize(("began", "length"), [(1, 10), (3, 10), (1, 40)])
def test_whoever_reads_reads_alike_in_a_job_that_resumed_at_a_later_step(began: int, length: int, helpers: int) -> None:
    """Nobody has read what was before: a shadow that reads along, and one that did not, are where the owner is."""
    seed()
    engine, streams = Loading(helpers), DataStreams()
    owner, shadow = (TrainingData(engine, Drawing(length=length), streams=streams) for _ in range(2))
    begun(engine, streams)
    worker = SimpleNamespace(me="a", session=SimpleNamespace(works=SilentWorks()), protects=False)
    worker.agree_on = lambda _, value: {"a": value(), "b": value()}
    engine.worker = worker
    reader: Any = None
    for step in range(began, began + 4):
        worker.step, engine.global_samples = step, step * MICRO_BATCHES * 2
        streams.settle(worker, position=step * MICRO_BATCHES)
        reader = reader or owner.first(0, step)
        another = TrainingData(engine, Drawing(length=length), streams=streams)
        streams.noticed = lambda: owner._samples.draw
        late = another.first(0, step) if streams.draws else None
        for read in itertools.islice(reader, MICRO_BATCHES):
            assert late is None or torch.equal(next(late), read)
        shadow.read_along(0, last=False)
        streams.take_in({"a": streams.contribution()}, worker=cast("Any", worker))
    assert streams.draws
    worker.step, engine.global_samples = step + 1, (step + 1) * MICRO_BATCHES * 2
    assert torch.equal(next(shadow.first(0, step + 1)), next(reader))
    other = DataStreams()
    other.take(streams.to_json())
    assert other.origin == streams.origin == began * MICRO_BATCHES


def test_samples_that_draw_nothing_are_not_read_again() -> None:
    engine, streams = Loading(0), DataStreams()
    dataset = Drawing(since=10)
    data = TrainingData(engine, dataset, streams=streams)
    begun(engine, streams)
    engine.worker = SimpleNamespace(step=4, session=SimpleNamespace(works=SilentWorks()))
    engine.global_samples = 24
    assert next(data.first(0, 4)).tolist() == [4.0, 5.0]
    assert not streams.contribution()


def test_who_reads_along_comes_nearer_in_each_iteration() -> None:
    seed()
    expected = stock(Drawing(), helpers=0, count=60)
    seed()
    engine, streams = Loading(0), DataStreams()
    data = TrainingData(engine, Drawing(), streams=streams)
    begun(engine, streams)
    streams.draws = True
    works = SilentWorks()
    for step in range(10, 15):
        engine.worker = SimpleNamespace(step=step, session=SimpleNamespace(works=works))
        engine.global_samples = step * MICRO_BATCHES * 2
        data.read_along(0, last=True)
    step += 1
    engine.worker.step, engine.global_samples = step, step * MICRO_BATCHES * 2
    assert torch.equal(next(data.last(0, step)), expected[step * MICRO_BATCHES])
    assert works.totals == [MICRO_BATCHES]  # what the step before took


def test_ends_read_their_own_numbers_and_a_step_that_is_complete_can_be_read_again() -> None:
    wanted = []
    for start in (5, 6):  # the ranks of the first and of the last stage
        torch.manual_seed(start)
        random.seed(6)
        numpy.random.seed(7)
        wanted.append(stock(Drawing(), helpers=0, count=9))
    engine, streams = Loading(0), DataStreams()
    training = TrainingData(engine, Drawing(), streams=streams)
    claims = {}
    for worker, start in (("a", 5), ("b", 6)):
        seed()
        torch.manual_seed(start)
        streams.begin()
        torch.empty((), dtype=torch.int64).random_()
        claims[worker] = streams.claim()
    streams.learn(claims, placement=Placement.initial(engine.job_grid, ("a", "b")))
    assert training.parted(0)
    data = PipelineData(home=0)
    data.set_factory(training.first, for_last=(training.last, training.parted))
    works = SilentWorks()
    for step in range(3):
        engine.worker = SimpleNamespace(step=step, session=SimpleNamespace(works=works))
        engine.global_samples = step * MICRO_BATCHES * 2
        for _ in range(2):  # again, as after a loss between the last micro-batch and the commit
            for last in (False, True):
                for micro_batch in range(MICRO_BATCHES):
                    read = data.get(0, micro_batch, step=step, last=last)
                    assert torch.equal(read, wanted[last][step * MICRO_BATCHES + micro_batch])
                    assert data.has_read(0, micro_batch, step=step, last=last)
            data.complete(MICRO_BATCHES, step=step)
        data.forget(step)
    assert works.totals == []  # one reader each


def test_another_size_of_micro_batches_is_refused_where_a_loader_keeps_its_own() -> None:
    engine: Any = SimpleNamespace(_training_set=Drawing(), train_micro_batch_size_per_gpu=lambda: 2)
    with pytest.raises(ConfigError, match=r"set_train_micro_batch_size\(1\) .* micro-batches of 2.*set_data_source"):
        ScriptEngine.set_train_micro_batch_size(engine, 1)


def test_a_worker_that_joins_has_the_jobs_size_of_micro_batches_too() -> None:
    now: list[tuple[int, int]] = [(8, 2)]
    batch = BatchOfJob(size=lambda: now[-1], change=lambda *size: now.append(size))
    batch.take(json.loads(json.dumps(BatchOfJob(size=lambda: (4, 1), change=lambda *size: None).to_json())))
    assert now == [(8, 2)]
    batch.adopt()
    batch.adopt()
    assert now == [(8, 2), (4, 1)]


def test_a_job_that_continues_has_its_size_of_batches_unless_the_configuration_has_another_one_since() -> None:
    sizes = [(8, 2)]
    before = BatchOfJob(size=lambda: sizes[-1], change=lambda *size: sizes.append(size))
    before.note(0, micro_batches=4)
    before.use((20, 2))
    before.note(3, micro_batches=10)
    saved = json.loads(json.dumps(before.to_json()))
    now: list[tuple[int, int]] = [(8, 2)]
    again = BatchOfJob(size=lambda: now[-1], change=lambda *size: now.append(size))
    assert again.restore(saved) == () and now == [(8, 2)]
    assert again.adopt() == again.adopt() == "" and now[-1] == (20, 2)
    now.append((6, 2))
    assert "batches of 6 samples (2 in a micro-batch)" in again.adopt()
    assert now[-1] == (20, 2) and again.counts.total(0, until=5) == 3 * 4 + 2 * 10
    other: list[tuple[int, int]] = [(12, 2)]
    changed = BatchOfJob(size=lambda: other[-1], change=lambda *size: other.append(size))
    assert "have 12 samples (2 in a micro-batch), and had 8 (2)" in changed.restore(saved)[0]
    changed.adopt()
    assert other == [(12, 2)]
    assert again.restore({}) == ()


def test_a_job_that_continues_says_which_settings_are_others_since() -> None:
    def of(**settings: Any) -> BatchOfJob:
        return BatchOfJob(size=lambda: (8, 2), change=lambda *size: None, settings=settings)

    params = {"lr": 0.01, "betas": [0.9, 0.99]}
    saved = json.loads(json.dumps(of(optimizer={"type": "Adam", "params": params}, train_batch_size=8).to_json()))
    assert of(optimizer={"type": "Adam", "params": params}, train_batch_size=16).restore(saved) == ()
    changed = {"optimizer": {"type": "Adam", "params": {**params, "lr": 0.02}}, "gradient_clipping": 1.0}
    (line,) = of(**changed, train_batch_size=8).restore(saved)
    assert "gradient_clipping is 1.0 and was absent; optimizer.params.lr is 0.02 and was 0.01. Training" in line
    older = {name: value for name, value in saved.items() if name != "settings"}
    assert of(**changed).restore(older) == ()


def test_who_shadows_an_end_no_more_reads_it_no_more() -> None:
    engine, streams = Loading(0), DataStreams()
    data = TrainingData(engine, Drawing(), streams=streams)
    begun(engine, streams)
    streams.draws = True
    engine.worker = SimpleNamespace(step=0)
    data.read_along(0, last=True)
    data.read_no_others([(0, True), (1, False)])
    assert len(data._along) == 1, "both ends of the pipeline read the same numbers"
    data.read_no_others([(1, False)])
    assert not data._along


def test_a_slice_of_the_samples_is_the_data_sets_own_affair() -> None:
    class Many(Drawing):
        def __getitem__(self, index: Any) -> Any:
            return list(range(10))[index] if isinstance(index, slice) else super().__getitem__(index)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[int(index)] for index in indices]

    samples = WatchedSamples(Many(since=5))
    assert samples[2:4] == [2, 3] and not samples.draw
    assert samples[1] == 1 and not samples.draw
    samples.__getitems__([4, 5])
    assert samples.draw


def test_streams_travel() -> None:
    seed()
    engine, streams, other = Loading(0), DataStreams(), DataStreams()
    begun(engine, streams)
    other.take(streams.to_json())
    assert other.to_json() == streams.to_json()
    assert other.stream(0, last=True) == streams.stream(0, last=False)
    before = states_now()
    torch.rand(3), random.gauss(0, 1), numpy.random.randn()
    states_from_text(states_to_text(before)).restore()
    assert states_to_text(states_now()) == states_to_text(before)


class SilentWorks:
    """In place of what tells of long work."""

    def __init__(self) -> None:
        self.totals: list[int] = []

    def watch(self, what: str, *, total: int, unit: str) -> Any:
        self.totals.append(total)
        return Work()


class Work:
    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, count: int) -> None:
        pass


def test_what_makes_a_batch_of_samples_is_watched_too() -> None:
    generator = torch.Generator()

    def masking(samples: list[Any]) -> Any:
        return torch.stack(samples) * (torch.rand(len(samples)) < 0.5)

    def with_its_own(samples: list[Any]) -> Any:
        return torch.stack(samples) + torch.rand((), generator=generator)

    assert WatchedSamples(Drawing(since=99)).collate is None
    samples = WatchedSamples(Drawing(since=99), collate=masking)
    assert not samples.draw and samples.collate is not None
    samples.collate([samples[0], samples[1]])
    assert samples.draw
    assert WatchedSamples(Drawing(since=99), collate=with_its_own).draw, "a generator of its own"
    assert not WatchedSamples(Drawing(since=99), collate=torch.stack).draw
