"""What is known of the durations of stages and the speed of workers, from what all workers measure in each iteration.

A worker is slow when its passes have taken much longer than they used to, compared with the others', in several
iterations one after the other. So a job that is slow as a whole (loaded machines) has no slow worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.timing import Profile

Passes = tuple[float, float]
"""Seconds of a forward and a backward of one stage, the mean of an iteration."""

_FIRST = 3  # samples of a stage before its durations are known
_IN_A_ROW = 4  # iterations in which a worker has to be slow, or no more
_SLOW, _WELL = 0.67, 0.85
_DRIFT = 0.02  # how much of a sample goes into what is known
_HANDOVER_SECONDS, _HANDOVER_SHARE = 1e-3, 0.1  # of a message: at least so long, and so much of a mean forward


@dataclass(frozen=True)
class Measured:
    """``stages``: what passes take on a worker that is not slow. ``speeds``: of the workers that are, below 1.

    ``first`` are the samples of stages that are not known yet, ``recent`` how fast workers were in the last
    iterations, compared with the others.
    """

    stages: Mapping[int, Passes] = field(default_factory=dict)
    speeds: Mapping[WorkerId, float] = field(default_factory=dict)
    first: Mapping[int, tuple[Passes, ...]] = field(default_factory=dict)
    recent: Mapping[WorkerId, tuple[float, ...]] = field(default_factory=dict)

    def after(self, samples: Mapping[WorkerId, Mapping[int, Passes]], *, members: Collection[WorkerId]) -> Measured:
        """With what one more iteration of ``members`` has shown: of each worker the passes of its stages, if any."""
        known = self._with_first(samples)
        compared = known._compared(samples)
        recent = {w: (*known.recent.get(w, ()), value)[-_IN_A_ROW:] for w, value in compared.items()}
        recent = {w: its for w, its in {**known.recent, **recent}.items() if w in members}
        speeds = {w: speed for w, its in recent.items() if (speed := _speed(its, known.speeds.get(w))) is not None}
        stages = dict(known.stages)
        for worker, its in samples.items():
            if worker not in speeds and compared.get(worker, 0.0) > _WELL:
                stages.update({s: _drifted(stages[s], passes) for s, passes in its.items() if s in stages})
        return replace(known, stages=stages, speeds=speeds, recent=recent)

    def profile(self, stages: int) -> Profile | None:
        """For placing; None until every stage is known."""
        if any(stage not in self.stages for stage in range(stages)):
            return None
        forward, backward = zip(*(self.stages[stage] for stage in range(stages)), strict=True)
        handover = max(_HANDOVER_SECONDS, _HANDOVER_SHARE * sum(forward) / stages)
        return Profile(forward, backward, dict(self.speeds), handover)

    def _with_first(self, samples: Mapping[WorkerId, Mapping[int, Passes]]) -> Measured:
        first, stages = dict(self.first), dict(self.stages)
        for its in samples.values():
            for stage, passes in its.items():
                if stage in stages or min(passes) <= 0.0:
                    continue
                first[stage] = (*first.get(stage, ()), passes)
                if len(first[stage]) >= _FIRST:
                    seen = first.pop(stage)
                    stages[stage] = (median(f for f, _ in seen), median(b for _, b in seen))
        return replace(self, stages=stages, first=first)

    def _compared(self, samples: Mapping[WorkerId, Mapping[int, Passes]]) -> dict[WorkerId, float]:
        """How fast each worker was, compared with what is known and with the others; 1 is as always."""
        ratios: dict[WorkerId, float] = {}
        for worker, its in samples.items():
            seen = {stage: passes for stage, passes in its.items() if stage in self.stages}
            taken = sum(map(sum, seen.values()))
            if taken > 0.0:
                ratios[worker] = sum(sum(self.stages[stage]) for stage in seen) / taken
        if len(ratios) < 2:
            return dict.fromkeys(ratios, 1.0)
        common = sorted(ratios.values())[len(ratios) // 2]
        return {worker: ratio / common for worker, ratio in ratios.items()}


def _speed(recent: tuple[float, ...], before: float | None) -> float | None:
    """Of a slow worker; None for one that is as fast as ever. A verdict stays until it is clearly over."""
    if len(recent) < _IN_A_ROW:
        return before
    if before is None:
        return median(recent) if max(recent) < _SLOW else None
    return None if min(recent) > _WELL else before


def _drifted(known: Passes, seen: Passes) -> Passes:
    return (known[0] + _DRIFT * (seen[0] - known[0]), known[1] + _DRIFT * (seen[1] - known[1]))
