"""What is needed of past steps to repeat them with the same result after an earlier state was restored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deepspeed_bamboo.runtime.stock.noted_values import NotedValues
from deepspeed_bamboo.runtime.stock.script_globals import GlobalValues
from deepspeed_bamboo.runtime.stock.torch_modes import TorchModes
from deepspeed_bamboo.runtime.stock.written import NOTHING, Written

BatchSize = tuple[int, int]
"""How many samples an iteration has, of all pipelines, and how many a micro-batch."""


@dataclass
class PastStep:
    """``written``: by hand, by the script, before it; ``values``: set in layers and hooks; ``evaluated``: how
    many micro-batches were evaluated since the step before; ``loss``: what it had, nothing while it is yet to be done;
    ``size``: of its batch, and ``modes`` in which it was done, likewise; ``named``: global variables before it.
    """

    written: Written = NOTHING
    values: tuple[NotedValues, ...] = ()
    evaluated: int = 0
    loss: float | None = None
    size: BatchSize | None = None
    modes: TorchModes | None = None
    named: GlobalValues | None = None

    @property
    def around(self) -> tuple[Any, ...]:
        """What most steps have alike."""
        return self.size, self.modes, self.named


@dataclass
class StepHistory:
    """Steps from ``first`` on, which can be done again. ``coming``: what belongs to step ``following`` already, the one
    after the last that this worker has done."""

    first: int = 0
    following: int = 0
    coming: PastStep = field(default_factory=PastStep)
    _steps: dict[int, PastStep] = field(default_factory=dict)

    def begin_anew(self, step: int) -> None:
        """Nothing before ``step`` can be done again."""
        self.first = self.following = step
        self.coming, self._steps = PastStep(), {}

    @property
    def plain_from(self) -> int:
        """From here on the script has done nothing before any step that would have to be done again with it."""
        past = [*self._steps.items(), (self.following, self.coming)]
        newest = next((own.around for own in reversed(self._steps.values())), None)
        plain = [
            step + 1
            for step, own in past
            if own.written or own.values or own.evaluated or own.around not in (PastStep().around, newest)
        ]
        return max(plain, default=self.first)

    @property
    def newest_modes(self) -> TorchModes | None:
        """In which the last step was done that is known; None where none is."""
        return next((own.modes for own in reversed(self._steps.values())), None)

    @property
    def kept_bytes(self) -> int:
        """How much memory the tensors take that are kept."""
        past = (*self._steps.values(), self.coming)
        return sum(own.written.nbytes + sum(values.nbytes for values in own.values) for own in past)

    def note(self, *, written: Written = NOTHING, values: Iterable[NotedValues] = (), evaluated: int = 0) -> None:
        """Before the next step."""
        self.coming.written += written
        self.coming.values += tuple(values)
        self.coming.evaluated += evaluated

    def done(
        self,
        step: int,
        *,
        loss: float,
        size: BatchSize | None = None,
        modes: TorchModes | None = None,
        named: GlobalValues | None = None,
    ) -> float | None:
        """``step`` is complete, with that loss. Returns the loss that it had before, if it was done again."""
        if step != self.following:
            return self.of(step).loss
        self.coming.loss, self.coming.size, self.coming.modes, self.coming.named = loss, size, modes, named
        self._steps[step], self.coming = self.coming, PastStep()
        self.following = step + 1
        return None

    def of(self, step: int) -> PastStep:
        """What was before ``step``, done before or coming; nothing where others did it, before this worker came."""
        return self.coming if step == self.following else self._steps.get(step, PastStep())

    def written_from(self, step: int) -> tuple[Written, ...]:
        """What the script has written before ``step`` and each one after it, in order."""
        return tuple(self.of(its).written for its in range(step, self.following + 1))

    def begin_at(self, step: int) -> None:
        """No step before ``step`` can be done again, or will be."""
        self.first = max(self.first, step)
        while self._steps and (oldest := next(iter(self._steps))) < step:  # they come in order
            del self._steps[oldest]
