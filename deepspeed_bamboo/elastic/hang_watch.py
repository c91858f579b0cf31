"""When a worker has stood still for too long: judged from its pulse, without clock or process."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from deepspeed_bamboo.pulse import AT_ITS_OWN_PACE, BEFORE_STEPS, PulseReading

HangAction = Literal["warn", "drain", "end"]

_FLOOR_SECONDS = 60.0
_USUAL_STEPS = 10.0
_LONGEST_STEPS = 2.0
_MEASURED = 50
_ENOUGH = 2
# One that waits stands still because of another, which is named first.
_WAITING_LIMITS = 2.0


@dataclass(frozen=True)
class HangRules:
    """The setting ``hangs``: when a worker counts as standing still, and what is done then.

    ``after_seconds``: None takes it from the job's own steps. ``start_seconds``: until two steps are complete.
    """

    after_seconds: float | None = None
    start_seconds: float = 600.0
    action: HangAction = "warn"


@dataclass(frozen=True)
class Hang:
    """A worker has been in ``doing`` of step ``step`` for ``seconds``; ``waiting``: for other workers."""

    doing: str
    step: int
    seconds: float
    waiting: bool

    @property
    def is_fault(self) -> bool:
        """False for who waits, and for what has no usual time: the script between steps, and files."""
        return not self.waiting and self.doing not in AT_ITS_OWN_PACE


@dataclass(frozen=True)
class Resumed:
    """It has continued, after so many seconds."""

    seconds: float


class HangWatch:
    """Gets the pulse of one worker from time to time; says once when it stands still, and once when it continues."""

    def __init__(self, rules: HangRules) -> None:
        self._rules = rules
        self._intervals: deque[float] = deque(maxlen=_MEASURED)  # of single steps, as far as looks can tell
        self._longest = 0.0
        self._step: tuple[int, float] | None = None  # the newest, and when it was first seen
        self._told: PulseReading | None = None

    @property
    def limit_seconds(self) -> float:
        """How long a worker may be busy with one thing."""
        if self._step is None or self._step[0] < _ENOUGH:
            return max(self._rules.start_seconds, self._rules.after_seconds or 0.0)
        if self._rules.after_seconds is not None:
            return self._rules.after_seconds
        usual = _USUAL_STEPS * statistics.median(self._intervals or [0.0])
        return max(_FLOOR_SECONDS, usual, _LONGEST_STEPS * self._longest)

    def look(self, pulse: PulseReading, *, now_seconds: float) -> Hang | Resumed | None:
        """``now_seconds`` is by the pulse's own clock. None: nothing (new) to say."""
        self._note_step(pulse, now_seconds)
        if self._told is not None:
            if pulse.since_seconds == self._told.since_seconds:
                return None
            lasted, self._told = now_seconds - self._told.since_seconds, None
            return Resumed(lasted)
        seconds = now_seconds - pulse.since_seconds
        if seconds < self.limit_seconds * (_WAITING_LIMITS if pulse.waiting else 1.0):
            return None
        self._told = pulse
        return Hang(pulse.doing, max(pulse.step, 0), seconds, pulse.waiting)

    def _note_step(self, pulse: PulseReading, now_seconds: float) -> None:
        if self._step is not None and pulse.step > self._step[0] != BEFORE_STEPS:
            taken = (now_seconds - self._step[1]) / (pulse.step - self._step[0])
            self._intervals.append(taken)
            self._longest = max(self._longest, taken)
        if self._step is None or pulse.step != self._step[0]:
            self._step = (pulse.step, now_seconds)
