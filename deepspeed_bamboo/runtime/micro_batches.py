"""The micro-batches of the running iteration: pulled once from the user's iterator, kept until it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed_bamboo.errors import ConfigError


class MicroBatchSource:
    """Pulls from the user's iterator in order and remembers what an iteration has pulled.

    A retried or taken-over micro-batch is therefore the same object, and the iterator advances exactly
    once per micro-batch and committed iteration, on every worker (DESIGN 6: sample order).
    """

    def __init__(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._pulled: list[Any] = []

    def set_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Use ``iterator`` from the next micro-batch on."""
        self._iterator = iterator

    @property
    def iterator(self) -> Iterator[Any] | None:
        """The iterator in use."""
        return self._iterator

    def get(self, micro_batch: int, *, transform: Callable[[Any], Any] | None = None) -> Any:
        """Micro-batch number ``micro_batch`` of this iteration. Raises what the iterator raises."""
        while len(self._pulled) <= micro_batch:
            batch = next(self._iterator) if self._iterator is not None else None
            self._pulled.append(transform(batch) if transform is not None else batch)
        return self._pulled[micro_batch]

    def complete(self, micro_batches: int, *, transform: Callable[[Any], Any] | None = None) -> None:
        """Pull what this worker did not need of an iteration, so that every worker's iterator agrees."""
        if micro_batches and self._iterator is not None:
            self.get(micro_batches - 1, transform=transform)

    def forget(self) -> None:
        """The iteration is committed: the next micro-batch is number 0 of the next one."""
        self._pulled.clear()

    def require(self, *, worker: str, why: str) -> None:
        """Raise ConfigError when this worker may need data and has no iterator."""
        if self._iterator is None:
            raise ConfigError(
                f"worker {worker} got no data iterator, but it {why}; with bamboo.redundancy on, every worker must "
                "be able to take over the first and the last stage. Pass the same iterator to train_batch() on "
                "every rank (or training_data to initialize), or set bamboo.redundancy.mode to \"off\"."
            )

    def check_complete(self, batch: Any, *, worker: str) -> None:
        """Raise ConfigError for a batch without inputs or labels, which another stage's owner would train on."""
        if batch is None or len(batch) < 2 or batch[0] is None or batch[1] is None:
            missing = "inputs" if batch is None or not len(batch) or batch[0] is None else "labels"
            raise ConfigError(
                f"worker {worker}: the data iterator yields no {missing}, but this worker must be able to take over "
                "the first and the last stage. Yield (inputs, labels) on every rank, or set "
                "bamboo.redundancy.mode to \"off\"."
            )
