"""``engine.set_batch_fn`` with data from a factory: a function that keeps something that moves is refused."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.iteration.batch_function import MOVES
from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build

Function = Callable[[Any], Any]
_DRAWN = torch.Generator()
_SEEN: dict[str, int] = {"batches": 0}
_calls = 0


def masked(batch: Any, generator: torch.Generator | None = None) -> Any:
    return batch[0] * (torch.rand(batch[0].shape, generator=generator) < 0.8), batch[1]


def with_generator() -> Function:
    generator = torch.Generator().manual_seed(5)
    return lambda batch: masked(batch, generator)


def with_default() -> Function:
    def mask(batch: Any, generator: Any = None) -> Any:
        return masked(batch, generator)

    mask.__defaults__ = (torch.Generator().manual_seed(5),)
    return mask


def with_count() -> Function:
    seen = 0

    def count(batch: Any) -> Any:
        nonlocal seen
        seen += 1
        return batch[0] + seen, batch[1]

    return count


def with_numpy() -> Function:
    drawn = SimpleNamespace(rng=np.random.default_rng(5))
    return lambda batch: (batch[0] * drawn.rng.random(), batch[1])


def with_python() -> Function:
    drawn = [random.Random(5)]
    return lambda batch: (batch[0] * drawn[0].random(), batch[1])


def with_average() -> Function:
    mean = torch.zeros(2)

    def centre(batch: Any) -> Any:
        mean.mul_(0.9).add_(batch[0], alpha=0.1)
        return batch[0] - mean, batch[1]

    return centre


def with_last() -> Function:
    kept = {"last": torch.zeros(2)}

    def mix(batch: Any) -> Any:
        last, kept["last"] = kept["last"], batch[0]
        return batch[0] + last, batch[1]

    return mix


def with_log() -> Function:
    log: list[float] = []

    def note(batch: Any) -> Any:
        log.append(0.0)
        return batch[0] * len(log), batch[1]

    return note


def counted(batch: Any) -> Any:
    global _calls
    _calls += 1
    return batch


def counted_inside(batch: Any) -> Any:
    _SEEN["batches"] += 1
    return batch


def drawn_inside(batch: Any) -> Any:
    return masked(batch, _DRAWN)


def by_itself(batch: Any) -> Any:
    by_itself.calls = getattr(by_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return batch


class Masking:
    __slots__ = ("_generator",)

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def __call__(self, batch: Any) -> Any:
        return masked(batch, self._generator)


class Counting:
    total = 0

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def by_class(self, batch: Any) -> Any:
        type(self).total += 1
        return batch

    def by_iterator(self, batch: Any) -> Any:
        return batch[0] + next(self.numbers), batch[1]

    def in_a_global(self, batch: Any) -> Any:
        return drawn_inside(batch)


MOVING: dict[str, tuple[Callable[[], Function], str]] = {
    "generator in a closure": (with_generator, "generator of with_generator"),
    "generator as a default": (with_default, "the defaults[0] of with_default"),
    "count in a closure": (with_count, "seen of with_count"),
    "numpy's generator in an object": (with_numpy, "drawn.rng of with_numpy"),
    "Python's generator in a list": (with_python, "drawn[0] of with_python"),
    "average": (with_average, "mean of with_average"),
    "last batch": (with_last, "kept['last'] of with_last"),
    "log": (with_log, "the length of log of with_log.<locals>.note"),
    "global variable": (lambda: counted, "_calls of counted (a global variable)"),
    "global dictionary": (lambda: counted_inside, "_SEEN['batches'] of counted_inside"),
    "generator of a function that it calls": (lambda: lambda batch: drawn_inside(batch), "_DRAWN of drawn_inside"),
    "attribute of its own": (lambda: by_itself, "by_itself.calls of by_itself"),
    "slots": (Masking, "._generator of engine.set_batch_fn"),
    "partial": (lambda: functools.partial(masked, generator=torch.Generator()), "arguments['generator']"),
    "attribute of a class": (lambda: Counting().by_class, "total of class Counting"),
    "iterator": (lambda: Counting().by_iterator, "self.numbers of Counting.by_iterator"),
    "method's global": (lambda: Counting().in_a_global, "_DRAWN of drawn_inside"),
    "torch's global generator": (lambda: masked, "torch's global generator"),
    "numpy's": (lambda: lambda batch: (batch[0] * np.random.rand(), batch[1]), "numpy's global generator"),
    "Python's": (lambda: lambda batch: (batch[0] * random.random(), batch[1]), "Python's global generator"),
}


def with_cache() -> Function:
    masks: dict[int, torch.Tensor] = {}

    def mask(batch: Any) -> Any:
        length = int(batch[0][0]) + 1  # another one in each batch
        return batch[0] * masks.setdefault(length, torch.ones(2)), batch[1]

    return mask


def with_preparation() -> Function:
    prepared = SimpleNamespace(ready=False, scale=None, calls=0)

    def prepare(batch: Any) -> Any:
        if not prepared.ready:
            prepared.ready, prepared.scale, prepared.calls = True, torch.ones(2), 1
        return batch[0] * prepared.scale, batch[1]

    return prepare


def with_scratch() -> Function:
    kept = {"positions": torch.arange(2)}

    def position(batch: Any) -> Any:
        kept["positions"] = torch.arange(2)  # the same again
        return batch[0] + kept["positions"], batch[1]

    return position


def seeded(batch: Any) -> Any:
    return masked(batch, torch.Generator().manual_seed(int(batch[0].sum())))


STILL: dict[str, Function] = {
    "cache": with_cache(),
    "preparation": with_preparation(),
    "scratch": with_scratch(),
    "seeded by the batch": seeded,
    "a constant": functools.partial(lambda scale, batch: (batch[0] * scale, batch[1]), torch.ones(2)),
}


def feed_of(function: Function, *, mode: str = "adaptive", pipelines: int = 1, kept: str | None = None) -> Feed:
    config = SimpleNamespace(redundancy=SimpleNamespace(mode=mode), checkpoint=SimpleNamespace(dir=kept))
    worker: Any = SimpleNamespace(
        session=SimpleNamespace(config=config),
        protects=mode != "off",
        grid=Grid(pipelines, 2),
        device=torch.device("cpu"),
        links=SimpleNamespace(flush=lambda *, within_seconds: None),
    )
    batch: Any = SimpleNamespace()
    return Feed(worker, data=PipelineData(0), home=0, transform=lambda: function, batch=batch, used=lambda: 0)


def batches(_: int, step: int) -> Any:
    return ((torch.full((2,), float(n)), torch.tensor(n)) for n in itertools.count(3 * step))


def step_of(feed: Feed, step: int) -> None:
    for micro_batch in range(3):
        feed.data.get(0, micro_batch, step=step, transform=feed._transform())
    feed.data.complete(3, step=step, transform=feed._transform())
    feed.data.forget(step)


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_is_refused_by_name_on_workers_that_never_called_it(name: str) -> None:
    make, named = MOVING[name]
    reader, other = feed_of(make()), feed_of(make())
    reader.data.set_factory(batches)
    step_of(reader, 0)
    told = {"w0": reader.function.contribution(), "w1": other.function.contribution()}
    assert told["w1"] == {}
    for feed in (reader, other):
        feed.function.take_in(told)
        with pytest.raises(ConfigError) as raised:
            feed.function.refuse_moving()
        assert named in str(raised.value) and "pass an iterator to train_batch on every rank" in str(raised.value)
        assert "a seed from the batch" in str(raised.value).replace("\n", " ")


@pytest.mark.parametrize("name", STILL)
def test_what_depends_on_the_batch_alone_is_not(name: str) -> None:
    feed = feed_of(STILL[name])
    feed.data.set_factory(batches)
    for step in range(3):
        step_of(feed, step)
        feed.function.take_in({"w0": feed.function.contribution()})
        feed.function.refuse_moving()
    function = STILL[name]
    assert feed.function.watched(function) is function, "after its first calls it is called as it is"


def test_with_iterators_every_worker_calls_it_and_nothing_is_refused() -> None:
    feed = feed_of(with_generator())
    feed.data.set_iterator(batches(0, 0))
    step_of(feed, 0)
    assert feed.function.contribution() == {}


@pytest.mark.parametrize(
    ("given", "refused"),
    [({}, False), ({"pipelines": 2}, True), ({"kept": "here"}, True)],
    ids=["alone", "two", "kept"],
)
def test_without_shadows_only_where_somebody_may_begin_to_call_it(given: dict[str, Any], refused: bool) -> None:
    feed = feed_of(with_generator(), mode="off", **given)
    feed.data.set_factory(batches)
    step_of(feed, 0)
    assert (MOVES in feed.function.contribution()) is refused


def test_a_function_that_comes_later_is_looked_at_too() -> None:
    functions: list[Function] = [seeded]
    feed = feed_of(lambda batch: functions[-1](batch))
    feed._script_transform = lambda: functions[-1]
    feed.data.set_factory(batches)
    for step in range(5):
        step_of(feed, step)
    assert feed.function.contribution() == {}
    functions.append(with_count())
    step_of(feed, 5)
    assert feed.function.contribution() == {MOVES: ["seen of with_count.<locals>.count"]}


def test_such_a_job_ends_on_all_workers_before_its_second_step(jobs: Jobs) -> None:
    training = Training("batch-function", 4, faults=[])
    result = jobs.run(train_with_masks, world=2, training=training)
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    for output in result.outputs.values():
        assert "generator of with_generator" in output and "trained step 1" not in output, result.transcript()


def train_with_masks(training: Training) -> None:
    def source(pipeline: int, step: int) -> Any:
        return models.micro_batches(models.vectors, pipeline=pipeline, first_step=step, count=training.micro_batches)

    engine = build(training)
    engine.set_data_source(source)
    engine.set_batch_fn(with_generator())
    for step in range(training.steps):
        engine.train_batch()
        print(f"trained step {step}")
    engine.close()
