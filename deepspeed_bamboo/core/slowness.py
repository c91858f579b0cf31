"""Which workers have become slow, and whose script or data loader keeps the others waiting.

Pure: values in, values out. What comes in is the same on every worker, so all find the same.

How slow a worker was in an iteration is the logarithm of what its passes took, divided by what they used to take on
it, minus the median of the same for the other workers. So 0 is as ever, 0.69 half the speed, and an iteration that
was slow for all is 0 for all. One value says little: on a loaded core an iteration in twenty is beyond 0.69 by
chance. Each is therefore limited, and the mean of the last ones decides: two stalls in five iterations are not
enough, four slow ones are. Where the others' values scatter widely the mean has to be larger, and more so in the
first iterations of a worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from deepspeed_bamboo.core.placement import WorkerId

_KEPT = 48  # iterations of a worker that say how it used to be
_ENOUGH = 5  # of them, for its own past to count
# The mean of so many iterations, and how much of the threshold it has to reach: the longer, the surer.
_WINDOWS = ((5, 1.0), (12, 0.75), (30, 0.6))
_SLOW, _SLOW_IN_NOISE = 0.45, 0.65  # 1.6 times as long; and 1.9, more is never asked for
_WELL = 0.18
_LIMIT = 0.8
_IDLE = 200  # iterations without a pass, after which a slow worker may show again what it can
_FEW = 30  # values of a worker, before which the threshold is also what the others' largest value was
_NOISE_FACTOR = 1.9  # the threshold, as a multiple of what nine tenths of the others' values are below
_SHARE, _SHARE_OVER = 0.25, 0.12  # of an iteration, for a script or a data loader to be named, or no more
_LEAST_SECONDS = 0.02
_IN_A_ROW = 4


Shows = Callable[[WorkerId, float, int], bool]
"""Whether so many of the last iterations took longer, as they would if that worker had that speed (1: as before)."""


def believed(_worker: WorkerId, _speed: float, _newest: int) -> bool:
    """What passes take is believed alone, see :data:`Shows`."""
    return True


@dataclass(frozen=True)
class Slowness:
    """What was seen of each worker. ``speeds``: of those that are slow, below 1. ``paces``: logarithms of what its
    passes took to what they should; ``beyond``: how much more that was than before and than on the others; newest last.
    """

    speeds: Mapping[WorkerId, float] = field(default_factory=dict)
    paces: Mapping[WorkerId, tuple[float, ...]] = field(default_factory=dict)
    beyond: Mapping[WorkerId, tuple[float, ...]] = field(default_factory=dict)
    idle: Mapping[WorkerId, int] = field(default_factory=dict)  # iterations in which a slow one had nothing to do

    def after(
        self, ratios: Mapping[WorkerId, float], *, members: Collection[WorkerId], shows: Shows = believed
    ) -> Slowness:
        """With one more iteration, in which the passes of a worker took ``ratios`` times what they should.

        The past of a slow worker stays as it was before that, so that it can be seen to be well again. A verdict stays
        until it is clearly over, or the worker has had no work for so long that nobody can know. ``shows`` has the last
        word on who is slow.
        """
        own = {worker: math.log(ratio) - self._usual(worker) for worker, ratio in ratios.items()}
        common = _medians_of_others(own)
        paces = {worker: its for worker, its in self.paces.items() if worker in members}
        beyond = {worker: its for worker, its in self.beyond.items() if worker in members}
        speeds = {worker: speed for worker, speed in self.speeds.items() if worker in members}
        for worker, value in own.items():
            beyond[worker] = (*beyond.get(worker, ()), value - common[worker])[-_KEPT:]
            if worker not in self.speeds:
                paces[worker] = (*paces.get(worker, ()), math.log(ratios[worker]))[-_KEPT:]
        idle = {worker: self.idle.get(worker, 0) + 1 for worker in speeds if worker not in ratios}
        for worker in [worker for worker, iterations in idle.items() if iterations >= _IDLE]:
            del speeds[worker], idle[worker]
            beyond[worker] = ()
        seen = Slowness(speeds, paces, beyond)
        for worker, its in seen.beyond.items():
            if worker in self.speeds and seen._is_well(worker):
                del speeds[worker]
                beyond[worker] = ()
            elif worker not in self.speeds and (window := seen._slow_for(worker)):
                speed = math.exp(-median(its[-_WINDOWS[0][0] :]))
                if shows(worker, speed, window):
                    speeds[worker] = speed
        return Slowness(speeds, paces, beyond, idle)

    def newest(self, worker: WorkerId) -> float:
        """Of the last iteration; 0 for a worker of which nothing is known."""
        return (self.beyond.get(worker) or (0.0,))[-1]

    def forget(self, workers: Collection[WorkerId]) -> Slowness:
        """They do other work now, so what they used to take says little."""
        return replace(self, paces={worker: its for worker, its in self.paces.items() if worker not in workers})

    def _usual(self, worker: WorkerId) -> float:
        """The newest ones are left out: a worker that has just become slow is compared with what it was."""
        past = self.paces.get(worker, ())[: -_WINDOWS[0][0]]
        return median(past) if len(past) >= _ENOUGH else 0.0

    def _slow_for(self, worker: WorkerId) -> int:
        """The number of iterations whose mean is slow enough, the fewest if there are several; 0 if none is."""
        its = self.beyond[worker]
        reached = [(_mean(its[-count:]) / share, count) for count, share in _WINDOWS if len(its) >= count]
        if max(reached, default=(0.0, 0))[0] < _SLOW:
            return 0
        threshold = self._threshold(worker)  # no less than that
        return next((count for value, count in reached if value >= threshold), 0)

    def _is_well(self, worker: WorkerId) -> bool:
        """The wider values scatter, the more iterations that takes: their mean is as sure as one of a few then."""
        count = min(_KEPT, round(_WINDOWS[0][0] * (self._threshold(worker) / _SLOW) ** 2))
        its = self.beyond[worker]
        return len(its) >= count and _mean(its[-count:]) <= _WELL

    def _threshold(self, worker: WorkerId) -> float:
        values = sorted(value for other, its in self.beyond.items() if other != worker for value in its)
        noise = _NOISE_FACTOR * values[int(0.9 * len(values))] if values else 0.0
        usual = min(max(_SLOW, noise), _SLOW_IN_NOISE)
        if len(self.beyond[worker]) >= _FEW or not values:
            return usual
        # A few values don't show how often stalls occur: one stall on any worker makes a few on this one likely.
        return max(usual, -values[0], values[-1])


def _mean(values: Sequence[float]) -> float:
    return fmean(max(-_LIMIT, min(_LIMIT, value)) for value in values)


def _medians_of_others(values: Mapping[WorkerId, float]) -> dict[WorkerId, float]:
    """For each worker the median of all the others; its own value where it is alone."""
    if len(values) < 2:
        return dict(values)
    ordered = sorted(values.values())
    middle, odd = divmod(len(ordered) - 1, 2)
    result = {}
    for worker, value in values.items():
        place = ordered.index(value) if len(ordered) < 2 * _KEPT else None
        if place is None:
            result[worker] = ordered[len(ordered) // 2]  # one among so many changes nothing
            continue
        rest = [*ordered[:place], *ordered[place + 1 :]]
        result[worker] = rest[middle] if odd else (rest[middle - 1] + rest[middle]) / 2.0
    return result


Cause = str
"""What a worker was busy with beside its passes: ``DATA`` or ``SCRIPT``."""

DATA, SCRIPT = "data", "script"


@dataclass(frozen=True)
class Delays:
    """Who keeps the others waiting by what it does beside passes. ``recent`` are its shares of the last iterations."""

    recent: Mapping[tuple[WorkerId, Cause], tuple[float, ...]] = field(default_factory=dict)
    found: Mapping[tuple[WorkerId, Cause], float] = field(default_factory=dict)

    def after(
        self, beside: Mapping[WorkerId, Mapping[Cause, float]], *, passes_seconds: float, members: Collection[WorkerId]
    ) -> Delays:
        """With one more iteration, whose passes took ``passes_seconds`` and in which each worker spent the seconds in
        ``beside``.

        ``found`` is how long, in units of the passes: at least a quarter more than on the others, four times in a row.
        """
        recent = {key: its for key, its in self.recent.items() if key[0] in members}
        for cause in (DATA, SCRIPT):
            seconds = {worker: its.get(cause, 0.0) for worker, its in beside.items()}
            if len(seconds) < 2:
                continue
            usual = _medians_of_others(seconds)
            for worker, its in seconds.items():
                more = its - usual[worker]
                share = more / passes_seconds if more >= _LEAST_SECONDS and passes_seconds > 0.0 else 0.0
                recent[worker, cause] = (*recent.get((worker, cause), ()), share)[-_IN_A_ROW:]
        found = {}
        for key, shares in recent.items():
            if key in self.found and max(shares) > _SHARE_OVER:
                found[key] = self.found[key]
            elif len(shares) == _IN_A_ROW and min(shares) > _SHARE:
                found[key] = median(shares)
        return Delays(recent, found)
