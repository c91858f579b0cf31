"""A data set given to ``initialize(training_data=...)``, readable from any global step and for any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.iteration.data_streams import DataStreams, End, Stream, states_now
from deepspeed_bamboo.runtime.iteration.watched_samples import WatchedSamples
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.randomness import GeneratorStates

_AT_ONCE = 4  # iterations of micro-batches that a worker which reads along catches up with in each iteration


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


class PassReader(Iterator[Any]):
    """The micro-batches of one end of a pipeline, pass after pass over the data set, as stock's loader yields them.

    What was skipped and what samples have drawn before is made up for when the first one is asked for.

    Args:
        loader: makes a loader that leaves out so many micro-batches of its first pass.
        stream: its random numbers; None: the script's.
        position: the first micro-batch, counted from the job's first.
        origin: none before it has drawn, or been read (in a job that resumed there), see :class:`DataStreams`.
        draws: whether samples draw, so that those since ``origin`` have to be read.
        pristine: where the generators were that the data set has itself, for a loader without helper processes.
    """

    def __init__(
        self,
        loader: Callable[[int], Any],
        *,
        stream: Stream | None,
        position: int,
        origin: int,
        draws: bool,
        pristine: GeneratorStates,
    ) -> None:
        self._loader = loader
        self._stream = stream
        whole = loader(0)
        self._helpers = _helpers_of(whole)
        first = position
        if draws and stream is not None:
            # Without helpers all samples draw from the same generators, from the first that was read on.
            of_pass = position - position % len(whole)
            first = min(position, max(origin, of_pass) if self._helpers else origin)
        number, within = divmod(first, len(whole))
        skipped = within - within % max(1, self._helpers)  # helpers take turns
        self._pristine = pristine
        self._running: GeneratorStates | None = None
        self.position = number * len(whole) + skipped
        self._pass = number
        self._iterator = self._begin(skipped)

    def __next__(self) -> Any:
        with self._lent():
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._pass += 1
                self._iterator = self._begin(0)
                batch = next(self._iterator)
        self.position += 1
        return batch

    def _begin(self, skipped: int) -> Iterator[Any]:
        if self._stream is None:
            return self._iterate(skipped)
        if self._running is not None:  # lent already
            return self._iterate(skipped)
        before = states_now()
        try:
            self._stream.before_pass(self._pass).restore()
            iterator = self._iterate(skipped)
        finally:
            before.restore()
        if not self._helpers:
            after = self._stream.after_pass_began(self._pass)
            self._running = _with_own(after, self._pristine)
        return iterator

    def _iterate(self, skipped: int) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader(skipped))
        return iterator

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Without helper processes: inside, the global generators are where this end's loader has left them."""
        if self._running is None:
            yield
            return
        known = [source for source, _ in self._pristine.tracked]
        before = GeneratorStates.now(torch.device("cpu"), known=known)
        self._running.restore()
        try:
            yield
        finally:
            self._running = GeneratorStates.now(torch.device("cpu"), known=known)
            before.restore()


def _with_own(states: GeneratorStates, own: GeneratorStates) -> GeneratorStates:
    return GeneratorStates(states.host, None, None, states.python, states.numpy, own.tracked)


def _helpers_of(loader: Any) -> int:
    """How many helper processes read for ``loader``: DeepSpeed's, or a DataLoader of the script's."""
    return int(getattr(loader, "num_local_io_workers", None) or getattr(loader, "num_workers", None) or 0)


class TrainingData:
    """Iterators over a data set: the samples, in the order, that DeepSpeed's own engine gives each pipeline.

    Args:
        engine: whose loaders these are.
        dataset: the script's.
        streams: its random numbers.
    """

    def __init__(self, engine: LoadingEngine, dataset: Any, *, streams: DataStreams) -> None:
        self._engine = engine
        self._samples = WatchedSamples(dataset, collate=getattr(engine, "collate_fn", None))
        self._streams = streams
        # As it is while the engine is built: scripts replace it around ``initialize`` to choose loader workers.
        self._loader_for = engine.deepspeed_io
        self._pristine = GeneratorStates.now(torch.device("cpu"), known=self._samples.sources)
        self._along: dict[tuple[int, bool], PassReader] = {}
        streams.noticed = lambda: self._samples.draw

    def first(self, pipeline: int, step: int) -> Iterator[Any]:
        """What the first stage of ``pipeline`` reads from ``step`` on."""
        return self._reader(pipeline, step, last=False)

    def last(self, pipeline: int, step: int) -> Iterator[Any]:
        """What the last stage of ``pipeline`` reads from ``step`` on."""
        return self._reader(pipeline, step, last=True)

    def parted(self, pipeline: int) -> bool:
        """Whether first and last stage read other random numbers."""
        return self._streams.parted(pipeline)

    def read_along(self, pipeline: int, *, last: bool) -> None:
        """At the end of an iteration, on a worker that may take that end over: be ready for it, or come closer.

        Nothing where samples draw no random numbers.
        """
        if not self._streams.draws:
            return
        last = last and self.parted(pipeline)
        wanted = self._micro_batches_before(self._engine.worker.step)
        reader = self._along.get((pipeline, last))
        if reader is None or reader.position > wanted:
            reader = self._along[pipeline, last] = self._made(pipeline, wanted, last=last)
        for _ in range(min(wanted - reader.position, _AT_ONCE * self._engine.micro_batches)):
            next(reader)

    def read_no_others(self, ends: Iterable[End]) -> None:
        """Only these are read along from now on; the helper processes of others end."""
        wanted = {(pipeline, last and self.parted(pipeline)) for pipeline, last in ends}
        self._along = {end: reader for end, reader in self._along.items() if end in wanted}

    def _reader(self, pipeline: int, step: int, *, last: bool) -> Iterator[Any]:
        last = last and self.parted(pipeline)
        wanted = self._micro_batches_before(step)
        reader = self._along.pop((pipeline, last), None)
        if reader is None or reader.position > wanted:
            reader = self._made(pipeline, wanted, last=last)
        if again := wanted - reader.position:
            works = self._engine.worker.session.works
            with works.watch("reading training_data again", total=again, unit="micro-batches") as work:
                for _ in range(again):
                    next(reader)
                    work.add(1)
        return reader

    def _made(self, pipeline: int, position: int, *, last: bool) -> PassReader:
        def loader(skipped: int) -> Any:
            sampler: Any = torch.utils.data.distributed.DistributedSampler(
                self._samples, num_replicas=self._engine.job_grid.pipelines, rank=pipeline, shuffle=False
            )
            skipped_samples = skipped * self._engine.micro_batch_size
            more = {} if self._samples.collate is None else {"collate_fn": self._samples.collate}
            positioned = PositionedSampler(sampler, skipped=skipped_samples)
            return self._loader_for(self._samples, data_sampler=positioned, **more)

        streams = self._streams
        return PassReader(
            loader,
            stream=streams.stream(pipeline, last=last),
            position=position,
            origin=streams.origin,
            draws=streams.draws,
            pristine=self._pristine,
        )

    def _micro_batches_before(self, step: int) -> int:
        """How many each pipeline has read before ``step``; their number may have changed in between."""
        engine = self._engine
        if step == engine.worker.step:
            return int(engine.global_samples) // (engine.micro_batch_size * engine.job_grid.pipelines)
        return step * engine.micro_batches
