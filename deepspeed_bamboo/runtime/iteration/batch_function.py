"""Whether the script's function for each micro-batch (``engine.set_batch_fn``) depends on more than the micro-batch.

Where data come from ``training_data`` or ``set_data_source`` only workers that read a micro-batch call it. One that
takes an end of a pipeline over, or a job that starts again, would begin with what the function kept at its start: a
generator of masks draws other masks for labels than for inputs. So such a function is refused within the first steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.iteration.micro_batches import Transform
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.moving_values import held_by, moved_between

MOVES = "the function for batches moves"
"""The name under which a worker reports what the function has changed."""
_LOOKS = 8  # calls of a function
_MOST_NAMED = 5
_LAST_MESSAGES_SECONDS = 5.0


class BatchFunction:
    """One worker's part of it, see the module.

    Args:
        worker: whose calls.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: Any = None
        self._looks = 0
        self._moved: Counter[str] = Counter()
        self._refused: list[str] = []

    def watched(self, function: Transform) -> Transform:
        """``function``, which is looked at in its first calls."""
        if function is None or not self._matters:
            return function
        code = getattr(function, "__code__", function)  # a script may make it anew for each step
        if code is not self._known:
            self._known, self._looks = code, 0
        if self._looks >= _LOOKS:
            return function

        def call(batch: Any) -> Any:
            before = held_by(function, device=self._worker.device)
            result = function(batch)
            # Twice: a function may prepare something in its first call.
            self._moved.update(moved_between(before, held_by(function, device=self._worker.device)))
            self._looks += 1
            return result

        return call

    @property
    def _matters(self) -> bool:
        """Whether anybody may ever begin to call it in the middle of a job."""
        config = self._worker.session.config
        return self._worker.protects or self._worker.grid.pipelines > 1 or config.checkpoint.dir is not None

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        moving = [name for name, times in self._moved.items() if times > 1]
        return {MOVES: moving} if moving else {}

    def take_in(self, contributions: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """What all have contributed to the iteration that has just ended."""
        self._refused = sorted({name for its in contributions.values() for name in its.get(MOVES, ())})

    def refuse_moving(self) -> None:
        """Before an iteration: raise ConfigError, on all workers alike, where it keeps something that moves."""
        if not self._refused:
            return
        self._worker.links.flush(within_seconds=_LAST_MESSAGES_SECONDS)  # the others must get this, not a lost worker
        more = len(self._refused) - _MOST_NAMED
        named = ", ".join(self._refused[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise ConfigError(
            f"the function that engine.set_batch_fn was given changes from one micro-batch to the next: {named}",
            "make it depend on its batch alone: draw random numbers from a generator that each call makes, with a seed "
            "from the batch, or in the samples of training_data; or pass an iterator to train_batch on every rank, in "
            "place of training_data and engine.set_data_source: then each worker calls it for every micro-batch",
            where="with training_data or engine.set_data_source only who reads a micro-batch calls the function: "
            "whoever takes a first or last stage over, or a job that starts again, would make other batches",
        )
