"""How a script that begins at step 0, while its job is at a later step, comes to that step.

The script's first call shows how it counts. A script that asks for ``global_steps``, and then counts by it, is at the
job's step at once. In a script that counts by itself ``train_batch`` returns at once until the script has called it as
often as the job has trained, and so does everything else that belongs to those steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites

_LOSS_UNKNOWN = (
    "the loss of a step that the job did before is not known here: train_batch returns the job's newest one for it. "
    "What the script decides by it (a best loss, an early stop) may differ from what it was then, from now on"
)
_EVALUATION_UNKNOWN = (
    "what an evaluation had that the job did before is not known here: eval_batch returns not a number for it. What "
    "the script decides by it (a rate, a best loss, an early stop) may differ from what it was then, from now on. Loop "
    "by engine.global_steps, or leave it out while engine.catching_up is true"
)


@dataclass(frozen=True)
class ScriptParts:
    """The worker whose script catches up, where the script is, and what else follows it.

    ``writes`` carries what the script writes into its optimizers, ``feed`` has its micro-batches, ``batch`` is the size
    of the job's, and ``beginning`` knows what the script loaded when the job began.
    """

    worker: Worker
    position: ScriptPosition
    writes: ScriptWrites
    feed: Feed
    batch: BatchOfJob
    beginning: Beginning


class CatchingUp(ABC):
    """See the module; a subclass says when OUTSIDE begins, and what happens on entering."""

    def __init__(self, parts: ScriptParts) -> None:
        self._worker = parts.worker
        self._position = parts.position
        self._writes = parts.writes
        self._feed = parts.feed
        self._batch = parts.batch
        self._beginning = parts.beginning
        self._asked = (-1, 0)  # before which call this script has loaded last, and how often
        self._said: set[str] = set()
        self.answers = False
        """Whether what the script's loads return is what they returned when the job began."""

    def enter(self, *, counts_by_itself: bool) -> None:
        """The script has shown how it counts."""
        position = self._position
        position.phase = Phase.INSIDE
        written = self._writes.written()
        self._take_part()
        if counts_by_itself and position.calls < position.reached:
            position.phase = Phase.CATCHING_UP
            self._writes.go_back(written)
        else:
            self._writes.come_back()
        if not counts_by_itself and (text := self._batch.adopt()):
            self.says("batch", text)

    def _take_part(self) -> None:  # noqa: B027 - a job that continues has begun with this worker
        """On entering: become one of the job's workers, if that is still to be done."""

    def _has_to_enter(self) -> bool:
        """Whether a script that counts by itself has to enter with this call of ``train_batch``."""
        return True

    @property
    def is_beyond(self) -> bool:
        """Whether the job has trained since its script began, in a run before this one."""
        return False

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """Whether what the script does now belongs to what the job has done before."""

    def passes_evaluation_by(self) -> bool:
        """Whether the evaluation that the script asks for is one that the job did before."""
        return self.is_behind

    def passes_save_by(self, save_dir: Any, tag: Any) -> bool:
        """The same of what it saves."""
        return self.is_behind

    def is_before_its_time(self) -> bool:
        """Whether this call of ``train_batch`` stands for an iteration that the job did before."""
        position = self._position
        if position.phase is Phase.OUTSIDE and self._has_to_enter():
            self.enter(counts_by_itself=True)
        if position.phase is Phase.CATCHING_UP and position.calls >= position.reached:
            self._arrive()
        return not position.inside

    def _arrive(self) -> None:
        """The script has come to the job's step."""
        self._position.phase = Phase.INSIDE
        self._writes.come_back()

    def past_loss(self) -> float:
        """The loss of the iteration for which a call of ``train_batch`` stands, which is passed by."""
        position = self._position
        loss = _known(lambda: self._worker.session.past.loss(position.calls))
        position.calls += 1
        if loss is not None:
            return loss
        self.says("loss", _LOSS_UNKNOWN)
        return position.loss

    def past_additional_losses(self) -> dict[str, float]:
        """Those of the iteration for which the last call of ``train_batch`` stood; empty where none are known."""
        try:
            return self._worker.session.past.additional(self._position.calls - 1)
        except CoordinatorUnavailable:
            return {}

    def past_evaluation(self) -> float:
        """What the evaluation had for which a call of ``eval_batch`` stands; not a number where that isn't known."""
        number = self._position.next_evaluation()
        loss = self._known_evaluation(number)
        if loss is None:
            self._before_unknown(number)
            loss = self._known_evaluation(number)
        if loss is not None:
            return loss
        self.says("evaluation", _EVALUATION_UNKNOWN)
        return math.nan

    def _known_evaluation(self, number: int) -> float | None:
        return _known(lambda: self._worker.session.past.evaluation(self._position.calls, number))

    def _before_unknown(self, number: int) -> None:  # noqa: B027 - see LateWorker
        """What evaluation ``number`` after these calls had isn't known yet: see to that."""

    def says(self, what: str, text: str) -> None:
        """Tell ``text`` on this worker, once for each ``what``."""
        if what not in self._said:
            self._said.add(what)
            tell(self._worker, text)

    @property
    def step(self) -> int:
        """The global step at which the script is, where the job is beyond."""
        at, count = self._asked
        calls = self._position.calls
        return self._beginning.step_at(calls, loads=count if at == calls else 0)

    def next_load(self, asked: Asked) -> Loaded:
        """What the script's next load returned when the job began, or what fits to how the script begins now."""
        at, (before, count) = self._position.calls, self._asked
        self._asked = (at, count + 1 if at == before else 1)
        return self._answer(self._asked[1] - 1, asked)

    @abstractmethod
    def _answer(self, number: int, asked: Asked) -> Loaded:
        """What load ``number`` before this call of ``train_batch`` returned when the job did that."""

    def before_activity(self) -> None:  # noqa: B027 - see LateWorker
        """Before anything that all workers do together."""

    @property
    def is_on_its_way(self) -> bool:
        """Whether the script has shown that it counts by itself, and has yet to come to the job's step."""
        return self._position.phase is Phase.CATCHING_UP

    @property
    def is_alone(self) -> bool:
        """Whether what the script now does together with others concerns this worker alone."""
        return False

    def calls_alone(self, name: str = "") -> bool:
        """As :attr:`is_alone`, for a collective, of torch or the engine's ``name``, by whose result scripts decide."""
        return False

    def check_iterator(self, iterator: Iterator[Any] | None) -> None:  # noqa: B027 - see LateWorker
        """Before the script's iterator for training becomes ``iterator``. Raises ExpelledError where it can't."""

    def where_data_end(self) -> AbstractContextManager[None]:
        """Inside, an iterator may end."""
        return nullcontext()

    @property
    def leaves_at_once(self) -> bool:
        """Whether a script that ends now leaves a job that does not know of it."""
        return False

    def at_close(self) -> AbstractContextManager[None]:
        """Inside, the script ends the job."""
        return nullcontext()


def _known(look: Callable[[], float | None]) -> float | None:
    try:
        return look()
    except CoordinatorUnavailable:
        return None
