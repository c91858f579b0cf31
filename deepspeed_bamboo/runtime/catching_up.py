"""An engine whose script begins at step 0 while its job is at a later step. It skips what the job has done already.

The script's first call shows how it counts. A script that asks for ``global_steps``, and then counts by it, is at the
job's step at once. In a script that counts by itself ``train_batch`` returns at once until the script has called it as
often as the job has trained, and so does everything else that belongs to those steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime.checkpoint.beginning import Loaded
from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


class Phase(Enum):
    """Where the script is."""

    OUTSIDE = "outside"  # it has not shown yet how it counts
    CATCHING_UP = "catching up"  # it counts by itself, and has not come to the job's step
    INSIDE = "inside"


class CatchingUpEngine(BambooPipelineEngine):
    """See the module; a subclass says when OUTSIDE begins, and what happens on entering."""

    _phase = Phase.INSIDE  # while stock builds the engine
    _calls = 0  # of train_batch, by a script that counts by itself; and the step at which it began
    _began = 0  # that step
    _answers = False  # whether what its loads return is what they returned when the job began
    _asked = 0  # how many it has done
    _reached = 0  # the job's step, as last heard of
    _loss = math.nan  # its loss there
    _evaluated = (-1, 0)  # how often the script has evaluated after how many of its calls

    def _enter(self, *, counts_by_itself: bool) -> None:
        """The script has shown how it counts."""
        self._phase = Phase.INSIDE
        written = self.script_writes.written()
        self._take_part()
        if counts_by_itself and self._calls < self._reached:
            self._phase = Phase.CATCHING_UP
            self.script_writes.go_back(written)
        else:
            self.script_writes.come_back()
        if not counts_by_itself:
            self.batch_of_job.adopt()

    def _begin_at(self, step: int) -> None:
        """What this script calls first belongs to ``step``."""
        self._calls += step - self._began
        self._began = step

    def _take_part(self) -> None:
        """On entering: become one of the job's workers, if that is still to be done."""

    def _has_to_enter(self) -> bool:
        """Whether a script that counts by itself has to enter with this call of ``train_batch``."""
        return True

    @property
    def _is_behind(self) -> bool:
        """Whether what the script does now belongs to what the job has done before."""
        return self._phase is not Phase.INSIDE

    @property
    def global_steps(self) -> int:
        """The job's iterations; a script that asks for it first counts by it."""
        if self._phase is Phase.OUTSIDE and self._calls == self._began:
            self._enter(counts_by_itself=False)
        return int(self._calls if self._phase is not Phase.INSIDE else self.__dict__["global_steps"])

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.__dict__["global_steps"] = count

    @property
    def catching_up(self) -> bool:  # type: ignore[override]
        """True while the script has yet to come to the job's step."""
        return self._phase is Phase.CATCHING_UP

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Inside, nothing that is looked at shows how the script counts."""
        before, self._phase = self._phase, Phase.INSIDE
        try:
            yield
        finally:
            self._phase = before

    def _is_before_its_time(self) -> bool:
        """Whether this call of ``train_batch`` stands for an iteration that the job did before."""
        if self._phase is Phase.OUTSIDE and self._has_to_enter():
            self._enter(counts_by_itself=True)
        if self._phase is Phase.CATCHING_UP and self._calls >= self._reached:
            self._phase = Phase.INSIDE
            self.script_writes.come_back()
        return self._phase is not Phase.INSIDE

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """As stock's, and surviving losses; the loss that it had for an iteration that the job did before."""
        if self._is_before_its_time():
            loss = self._past(lambda: self.session.past.loss(self._calls))
            self._calls += 1
            self.data.pass_by(data_iter, micro_batches=self.micro_batches)
            return torch.tensor(self._loss if math.isnan(loss) else loss, device=self.device)
        self._answers = False
        return super().train_batch(data_iter)

    def eval_batch(self, data_iter: Iterator[Any] | None, return_logits: bool = False, **arguments: Any) -> Any:  # type: ignore[override]
        """As stock's; what it was where the job evaluated before, not a number where that isn't known."""
        if not self._is_behind:
            with self._unnoticed():
                return super().eval_batch(data_iter, return_logits, **arguments)
        # One iterator may serve all evaluations; the others' has gone on.
        self.evaluated.skip(data_iter, arguments.get("num_micro_batches") or self.micro_batches)
        step, number = self._evaluated
        number = number + 1 if step == self._calls else 0
        self._evaluated = (self._calls, number)
        loss = torch.tensor(self._past(lambda: self.session.past.evaluation(self._calls, number)), device=self.device)
        return (loss, None) if return_logits else loss

    def _past(self, look: Callable[[], float]) -> float:
        try:
            return look()
        except CoordinatorUnavailable:
            return math.nan

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """As stock's; before this worker trains it reads nothing, and returns what it returned when the job began."""
        if not self._answers:
            return super().load_checkpoint(*arguments, **options)
        self._asked += 1
        return self._answer(self._asked - 1)

    def _answer(self, call: int) -> Loaded:
        """What load number ``call`` returned when the job began."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for the others, unless they have been here before."""
        if not self._is_behind:
            with self._unnoticed():
                super().barrier()

    def state_digest(self) -> str:
        """Of the job's state; empty where it was computed before."""
        if self._is_behind:
            return ""
        with self._unnoticed():
            return super().state_digest()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """As stock's; nothing where the job saved one before: the state of then is not there any more."""
        if self._is_behind:
            return True
        with self._unnoticed():
            return super().save_checkpoint(*arguments, **options)
