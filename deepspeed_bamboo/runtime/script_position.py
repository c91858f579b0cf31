"""Where a script is whose job is at a later step: how it counts, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where the script is."""

    OUTSIDE = "outside"  # it has not shown yet how it counts
    CATCHING_UP = "catching up"  # it counts by itself, and has not come to the job's step
    INSIDE = "inside"


@dataclass
class ScriptPosition:
    """One script's position; that of a job which begins, until somebody says otherwise.

    ``calls``: of ``train_batch``, by a script that counts by itself, and the step ``began`` at which it began.
    ``reached`` is the job's step, as last heard of, and ``loss`` the job's loss there. ``trained``: it has trained.
    """

    phase: Phase = Phase.INSIDE
    calls: int = 0
    began: int = 0
    reached: int = 0
    loss: float = math.nan
    trained: bool = False
    _evaluated: tuple[int, int] = (-1, 0)  # how often the script has evaluated after how many of its calls

    @property
    def inside(self) -> bool:
        """Whether the script is where its job is."""
        return self.phase is Phase.INSIDE

    @property
    def untouched(self) -> bool:
        """Whether the script has shown nothing of how it counts, and has trained nothing."""
        return self.phase is Phase.OUTSIDE and self.calls == self.began

    @property
    def only_passed_by(self) -> bool:
        """Whether every iteration that the script has asked for was one that the job did before."""
        return not self.trained and self.calls > self.began

    def begin_at(self, step: int) -> None:
        """What this script calls first belongs to ``step``."""
        self.calls += step - self.began
        self.began = step

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Inside, nothing that is looked at shows how the script counts."""
        before, self.phase = self.phase, Phase.INSIDE
        try:
            yield
        finally:
            self.phase = before

    @property
    def evaluations(self) -> int:
        """How many evaluations after the newest of its calls the script has asked for."""
        step, number = self._evaluated
        return number + 1 if step == self.calls else 0

    def next_evaluation(self) -> int:
        """The number of an evaluation that begins, among those after the same call of ``train_batch``; from 0."""
        step, number = self._evaluated
        number = number + 1 if step == self.calls else 0
        self._evaluated = (self.calls, number)
        return number
