"""The micro-batches of the running iteration: pulled once from an iterator, and kept until it is committed."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.randomness import generators_untouched

DataFactory = Callable[[int, int], Iterator[Any]]
"""From a pipeline and a global step to an iterator over that pipeline's micro-batches from that step on."""

Transform = Callable[[Any], Any] | None
_COMPARED_NUMBERS = 4096


def own_copy(batch: Any) -> Any:
    """``batch`` with a copy of each tensor in its tuples, lists and dictionaries; anything else is the same object."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, batch)


def read_past(iterator: Iterator[Any], transform: Transform) -> None:
    """Read one micro-batch of ``iterator``, do to it what the script would have done, and drop it.

    Raises what the iterator raises.
    """
    batch = next(iterator)
    if transform is not None:
        transform(batch)


class MicroBatchSource:
    """Pulls from an iterator in order and remembers what an iteration has pulled.

    A retried or taken-over micro-batch is therefore the same object, and the iterator advances exactly
    once per micro-batch and committed iteration, on every worker (architecture 6: sample order).
    """

    def __init__(self, iterator: Iterator[Any] | None = None, *, first_step: int = 0) -> None:
        """``first_step``: the global step whose first micro-batch the iterator yields first."""
        self.first_step = first_step
        self._iterator = iterator
        self.seconds = 0.0  # that reading has taken
        self._pulled: list[Any] = []
        self._before = 0  # pulled in iterations that are committed
        self._last = (0, 0)
        self._kept: dict[int, list[Any]] | None = None  # by step, for when it is done again
        self._kept_bytes: dict[int, int] = {}  # of their tensors
        self._again: deque[Any] = deque()

    @property
    def iterator(self) -> Iterator[Any] | None:
        """The iterator in use."""
        return self._iterator

    def set_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Use ``iterator`` from the next micro-batch on."""
        self._iterator = iterator

    def get(self, micro_batch: int, *, transform: Transform = None) -> Any:
        """Micro-batch number ``micro_batch`` of this iteration. Raises what the iterator raises."""
        while len(self._pulled) <= micro_batch:
            if self._again:
                self._pulled.append(self._again.popleft())
                continue
            started = time.perf_counter()
            batch = None if self._iterator is None else self._next(self._iterator)
            # Copied, as stock does when it loads a batch: loaders may write the next one into the same memory.
            self._pulled.append(own_copy(transform(batch) if transform is not None else batch))
            self.seconds += time.perf_counter() - started
        return self._pulled[micro_batch]

    @property
    def has_been_used(self) -> bool:
        """Whether anything was pulled."""
        return bool(self._before or self._pulled)

    def has_read(self, micro_batch: int) -> bool:
        """Whether :meth:`get` returns it without reading."""
        return micro_batch < len(self._pulled)

    def _next(self, iterator: Iterator[Any]) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            raise StopIteration(
                f"the data iterator has ended after {self._before + len(self._pulled)} micro-batches, in the middle of "
                "a job; pass one with more, or one that begins again (deepspeed.utils.RepeatingLoader)"
            ) from None

    def forget(self, step: int) -> None:
        """The iteration of ``step`` is committed: the next micro-batch is number 0 of the next one."""
        if not self._pulled:
            return
        if self._kept is not None:
            self._kept[step] = list(self._pulled)
            self._kept_bytes[step] = sum(map(_bytes, self._pulled))
        self._last = (self._before, self._before + len(self._pulled))
        self._before += len(self._pulled)
        self._pulled.clear()

    def keep(self) -> None:
        """From now on keep what is pulled, for :meth:`rewind`."""
        self._kept, self._kept_bytes = {}, {}

    def keep_from(self, step: int) -> None:
        """No step before ``step`` will be done again."""
        kept = self._kept or {}
        while kept and (oldest := next(iter(kept))) < step:  # steps come in order
            self._drop(oldest)

    def _drop(self, step: int) -> list[Any]:
        self._kept_bytes.pop(step, None)
        return [] if self._kept is None else self._kept.pop(step, [])

    @property
    def kept_bytes(self) -> int:
        """How much memory the tensors take that are kept."""
        return sum(self._kept_bytes.values())

    def rewind(self, step: int) -> None:
        """The next micro-batch is number 0 of ``step`` again, and so on from there, as it was kept."""
        kept = self._kept or {}
        again = [self._drop(done) for done in sorted(kept) if done >= step]
        self._before -= sum(map(len, again))
        self._again = deque([*(batch for batches in again for batch in batches), *self._pulled, *self._again])
        self._pulled.clear()

    def used(self, micro_batches: int) -> tuple[int, int]:
        """Which micro-batches the last committed iteration took, counted from the job's first: begin, end.

        ``micro_batches``: of one iteration.
        """
        offset = self.first_step * micro_batches
        return offset + self._last[0], offset + self._last[1]


class PipelineData:
    """The micro-batches of every pipeline that a worker may have to feed.

    The user's iterator belongs to ``home``, the pipeline in which this worker started. The data of other
    pipelines, and of ``home`` when there is no iterator, come from a factory, which positions by global step:
    so only a source that is used advances, and one that was not starts again at the right step.
    """

    def __init__(self, home: int) -> None:
        self._home = home
        self._user = MicroBatchSource()
        self._factory: DataFactory | None = None
        self._for_last: tuple[DataFactory, Callable[[int], bool]] | None = None
        self._made: dict[tuple[int, bool], tuple[int, MicroBatchSource]] = {}  # by pipeline, and whether for the last
        self._joined_late = False
        self._to_skip = 0
        self._iterators = 0  # that the script has passed
        self._left: frozenset[int] = frozenset()
        self.distrusted = False  # what this worker has is other data than the others have
        self._shows_itself = False  # the script counts by itself, and has passed its iterators for all that was before

    def start_at(self, step: int, *, used: int) -> None:
        """This worker begins at global step ``step``; others have used that many micro-batches of their iterators.

        With a factory, which positions itself, the user's iterator is not used at all. Without one, the iterator
        is taken to begin where theirs did, and what those have used is skipped.
        """
        self._joined_late = True
        self._to_skip = used
        self._user.first_step = step

    def pass_by(self, iterator: Iterator[Any] | None, *, micro_batches: int, transform: Transform = None) -> None:
        """The script has passed ``iterator`` for an iteration of ``micro_batches`` that the job did before: read them.

        So every iterator of the script is where it is on the others, also one for each epoch, or several in turn; and
        so is what ``transform`` keeps (a generator of masks, a count). Raises what the iterator raises.
        """
        its = self._user.iterator if iterator is None else iterator
        self._shows_itself = True
        if its is None or self._factory is not None:
            return
        for _ in range(micro_batches):
            read_past(its, transform)

    def resume_at(self, step: int) -> None:
        """A checkpoint was read: the user's iterator, of which nothing is used yet, begins at global step ``step``.

        Factories make theirs anew for another step, for whoever takes an end of a pipeline over reads by that, too.
        """
        self._user.first_step = step
        self._made = {key: made for key, made in self._made.items() if made[0] == step}

    @property
    def iterator(self) -> Iterator[Any] | None:
        """The user's iterator."""
        return self._user.iterator

    @property
    def covers_every_pipeline(self) -> bool:
        """True when there is a factory."""
        return self._factory is not None

    def set_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Use the user's ``iterator`` for the home pipeline from the next micro-batch on."""
        if iterator is not None and iterator is not self._user.iterator:
            self._iterators += 1
        self._user.set_iterator(iterator)

    def _skip(self, transform: Transform) -> None:
        iterator = self._user.iterator
        if self._shows_itself:
            return
        while self._to_skip and iterator is not None:
            read_past(iterator, transform)
            self._to_skip -= 1

    def _uses_iterator(self) -> bool:
        late = self._joined_late and self._factory is not None
        return self._user.iterator is not None and not late and not self.distrusted

    @property
    def several(self) -> bool:
        """Whether the script has passed more than one iterator."""
        return self._iterators > 1

    @property
    def guesses(self) -> bool:
        """Whether the place of the user's iterator is a guess: this worker came late, and its script doesn't count."""
        return self._joined_late and not self._shows_itself and self._factory is None

    def would_guess(self, iterator: Iterator[Any] | None) -> bool:
        """Whether nobody can know to which step ``iterator``, another one than before, belongs."""
        another = iterator is not None and iterator is not self._user.iterator and self._user.has_been_used
        return self.guesses and not self.distrusted and another

    def first(self, *, step: int, transform: Transform = None) -> dict[int, int]:
        """By pipeline a checksum of the first micro-batch of ``step``, where that is from the user's iterator.

        It is then pulled, and kept for the iteration. Nothing where the iterator has ended.
        """
        if not self._uses_iterator():
            return {}
        try:
            return {self._home: checksum_of(self.get(self._home, 0, step=step, transform=transform))}
        except StopIteration:
            return {self._home: -1}

    def first_made(self, *, step: int) -> dict[int, int]:
        """As :meth:`first`, of training_data in the place of the script's iterator; nothing where one is missing."""
        if self._factory is None or self._for_last is None or not self._uses_iterator():
            return {}
        with generators_untouched(torch.device("cpu")):
            made = next(iter(self._factory(self._home, step)), None)
        return {self._home: -1 if made is None else checksum_of(made)}

    def set_factory(
        self, factory: DataFactory | None, *, for_last: tuple[DataFactory, Callable[[int], bool]] | None = None
    ) -> None:
        """Use ``factory`` from the next iteration on.

        ``for_last``: another one for the last stages of those pipelines for which it returns true.
        """
        self._factory, self._for_last = factory, for_last
        self._made.clear()

    def has(self, pipeline: int) -> bool:
        """True when there is data for ``pipeline``."""
        return pipeline in self.own or (self._factory is not None and pipeline not in self._left)

    @property
    def own(self) -> tuple[int, ...]:
        """The pipeline whose data the user's iterator has."""
        return (self._home,) if self._user.iterator is not None and not self.distrusted else ()

    def leave_to_others(self, pipelines: Iterable[int]) -> None:
        """The factory is not used for these, of which other workers' iterators have the data."""
        self._left = frozenset(pipelines)

    def get(
        self, pipeline: int, micro_batch: int, *, step: int, transform: Transform = None, last: bool = False
    ) -> Any:
        """Micro-batch ``micro_batch`` of ``pipeline`` in ``step``, ``last``: as its last stage reads it.

        Raises what iterator or factory raise.
        """
        if self._uses_iterator():
            self._skip(transform)
        return self._source(pipeline, step, last=last).get(micro_batch, transform=transform)

    def has_read(self, pipeline: int, micro_batch: int, *, step: int, last: bool = False) -> bool:
        """Whether :meth:`get` returns it without running anything of the user's."""
        if pipeline == self._home and self._uses_iterator():
            return self._user.has_read(micro_batch)
        source = self._made_for(self._key(pipeline, last), step)
        return source is not None and source.has_read(micro_batch)

    def reads(self, pipeline: int, *, step: int, last: bool) -> bool:
        """Whether this worker has an iterator that is in ``step``, for that end of ``pipeline``."""
        if pipeline == self._home and self._uses_iterator():
            return True
        return self._made_for(self._key(pipeline, last), step) is not None

    def _key(self, pipeline: int, last: bool) -> tuple[int, bool]:
        return pipeline, last and self._for_last is not None and self._for_last[1](pipeline)

    def complete(self, micro_batches: int, *, step: int, transform: Transform = None) -> None:
        """Pull what this worker did not need of ``step``, so that every worker's iterator agrees."""
        if micro_batches and self._uses_iterator():
            self._skip(transform)
            self._user.get(micro_batches - 1, transform=transform)
        self.complete_made(micro_batches, step=step, transform=transform)

    def complete_made(self, micro_batches: int, *, step: int, transform: Transform = None) -> None:
        """As :meth:`complete`, for what factories made."""
        for key, (made_for, source) in list(self._made.items()):
            if micro_batches and made_for == step:
                source.get(micro_batches - 1, transform=transform)
                self._made[key] = (step + 1, source)

    def used(self, pipeline: int, *, micro_batches: int) -> tuple[int, int]:
        """Which micro-batches of ``pipeline`` the last committed iteration took, see :meth:`MicroBatchSource.used`."""
        if pipeline == self._home and self._uses_iterator():
            return self._user.used(micro_batches)
        made = self._made.get((pipeline, False)) or self._made.get((pipeline, True))
        return made[1].used(micro_batches) if made else (0, 0)

    def take_seconds(self) -> float:
        """How long reading has taken since the last call."""
        sources = [self._user, *(source for _, source in self._made.values())]
        seconds = sum(source.seconds for source in sources)
        for source in sources:
            source.seconds = 0.0
        return seconds

    def forget(self, step: int) -> None:
        """The iteration of ``step`` is committed: the next micro-batch is number 0 of the next one."""
        self._user.forget(step)
        for _, source in self._made.values():
            source.forget(step)

    def keep(self) -> None:
        """From now on keep what is taken from the user's iterator, for :meth:`rewind`."""
        self._user.keep()

    def keep_from(self, step: int) -> None:
        """No step before ``step`` will be done again."""
        self._user.keep_from(step)

    @property
    def kept_bytes(self) -> int:
        """How much memory the tensors take that are kept."""
        return self._user.kept_bytes

    def rewind(self, step: int) -> None:
        """Between iterations: continue from ``step`` with the micro-batches that it had; a factory makes them again."""
        self._user.rewind(step)
        self._made.clear()

    def _made_for(self, key: tuple[int, bool], step: int) -> MicroBatchSource | None:
        """What a factory made, if it is in ``step``; it has all of it where ``step`` is complete but not committed."""
        made_for, source = self._made.get(key, (None, None))
        return source if made_for in (step, step + 1) else None

    def _source(self, pipeline: int, step: int, *, last: bool) -> MicroBatchSource:
        if pipeline == self._home and self._uses_iterator():
            return self._user
        key = self._key(pipeline, last)
        source = self._made_for(key, step)
        if source is None:
            factory = self._for_last[0] if key[1] and self._for_last is not None else self._factory
            source = MicroBatchSource(factory(pipeline, step) if factory is not None else None, first_step=step)
            self._made[key] = (step, source)
        return source


def checksum_of(batch: Any) -> int:
    """Of the beginnings of all tensors in ``batch``, and of its numbers: enough to tell micro-batches apart."""
    total = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            some = leaf.detach().reshape(-1)[:_COMPARED_NUMBERS].cpu().contiguous()
            data = repr((tuple(leaf.shape), leaf.dtype)).encode() + some.view(torch.uint8).numpy().tobytes()
        else:
            data = repr(leaf).encode() if isinstance(leaf, (bool, int, float, str)) else b""
        total = zlib.crc32(data, total)
    return total


def _bytes(value: Any) -> int:
    """How much memory the tensors in ``value`` take."""
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return int(getattr(value, "nbytes", 0))


def missing_data(*, worker: str, pipeline: int, home: int, why: str) -> ConfigError:
    """The error for a worker that ``why`` (hosts or shadows an end of ``pipeline``) and has no data for it."""
    if pipeline == home:
        return ConfigError(
            f"worker {worker} has no data iterator, but it {why}, and then nobody else has the data of pipeline "
            f"{pipeline}. Pass the same iterator to train_batch() on the first and the last stage, better on every "
            "rank, or training_data to initialize"
        )
    return ConfigError(
        f"worker {worker} {why}, but its data iterator is that of pipeline {home}. Tell the engine where the data "
        f"of pipeline {pipeline} come from: engine.set_data_source(lambda pipeline, step: iterator), called on every "
        "rank before training; or pass training_data to initialize, which every pipeline can be fed from."
    )


def check_complete(batch: Any, *, worker: str) -> None:
    """Raise ConfigError for a batch without inputs or labels, which another stage's owner would train on."""
    if batch is None or len(batch) < 2 or batch[0] is None or batch[1] is None:
        missing = "inputs" if batch is None or not len(batch) or batch[0] is None else "labels"
        raise ConfigError(
            f"worker {worker}: the data iterator yields no {missing}, but whoever takes the first or the last stage "
            "over needs both. Yield (inputs, labels) on every rank that has an iterator"
        )
