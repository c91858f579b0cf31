"""What is known of the durations of stages and the speed of workers, from what all workers measure in each iteration.

Who is slow is found by ``core/slowness.py``. A job that is slow as a whole (loaded machines) has no slow worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.slowness import Slowness, believed
from deepspeed_bamboo.core.spans import Spans
from deepspeed_bamboo.core.timing import Profile

Passes = tuple[float, float]
"""Seconds of a forward and a backward of one stage, the mean of an iteration."""

_FIRST = 3  # samples of a stage before its durations are known
_AS_EVER = 0.16  # up to so slow a worker shows what its stages take
_DRIFT = 0.02  # how much of a sample goes into what is known
_HANDOVER_SECONDS, _HANDOVER_SHARE = 1e-3, 0.1  # of a message: at least so long, and so much of a mean forward


@dataclass(frozen=True)
class Iteration:
    """One iteration as a whole.

    Args:
        seconds: from its first pass to its last.
        micro_batches: of each pipeline.
        predicted: returns how many seconds an iteration takes longer if that worker has that speed.
    """

    seconds: float
    micro_batches: int
    predicted: Callable[[WorkerId, float], float]


@dataclass(frozen=True)
class Measured:
    """``stages``: what passes take on a worker that is not slow.

    ``first`` are the samples of stages that are not known yet, ``slowness`` is how workers were in the last
    iterations, ``seen`` the stages that each had in the last one, ``spans`` what whole iterations took.
    """

    stages: Mapping[int, Passes] = field(default_factory=dict)
    first: Mapping[int, tuple[Passes, ...]] = field(default_factory=dict)
    slowness: Slowness = field(default_factory=Slowness)
    seen: Mapping[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)

    @property
    def speeds(self) -> Mapping[WorkerId, float]:
        """Of the workers that are slow, below 1."""
        return self.slowness.speeds

    def after(
        self,
        samples: Mapping[WorkerId, Mapping[int, Passes]],
        *,
        members: Collection[WorkerId],
        iteration: Iteration | None = None,
    ) -> Measured:
        """With what one more iteration of ``members`` has shown: of each worker the passes of its stages, if any.

        Without ``iteration`` what a worker's passes take is believed alone.
        """
        known = self._with_first(samples)
        seen = {**{w: its for w, its in self.seen.items() if w in members}, **{w: tuple(samples[w]) for w in samples}}
        moved = [worker for worker in samples if worker in self.seen and self.seen[worker] != seen[worker]]
        slowness, spans, shows = self.slowness.forget(moved), self.spans, believed
        if iteration is not None:
            spread = (iteration.micro_batches, tuple(sorted(seen.values())), tuple(sorted(slowness.speeds)))
            spans = spans.after(spread, seconds=iteration.seconds)
            shows = partial(_shows, spans, spread, iteration)
        slowness = slowness.after(known._ratios(samples), members=members, shows=shows)
        stages = dict(known.stages)
        for worker, its in samples.items():
            if worker not in slowness.speeds and slowness.newest(worker) < _AS_EVER:
                stages.update({s: _drifted(stages[s], passes) for s, passes in its.items() if s in stages})
        return replace(known, stages=stages, slowness=slowness, seen=seen, spans=spans)

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

    def _ratios(self, samples: Mapping[WorkerId, Mapping[int, Passes]]) -> dict[WorkerId, float]:
        """How much of what is known each worker's passes have taken; of those of which something is known."""
        ratios: dict[WorkerId, float] = {}
        for worker, its in samples.items():
            known = sum(sum(self.stages[stage]) for stage in its if stage in self.stages)
            taken = sum(sum(passes) for stage, passes in its.items() if stage in self.stages)
            if taken > 0.0:
                ratios[worker] = taken / known
        return ratios


def _shows(spans: Spans, spread: Hashable, iteration: Iteration, worker: WorkerId, speed: float, newest: int) -> bool:
    return spans.show(spread, newest=newest, predicted=lambda: iteration.predicted(worker, speed))


def _drifted(known: Passes, seen: Passes) -> Passes:
    return (known[0] + _DRIFT * (seen[0] - known[0]), known[1] + _DRIFT * (seen[1] - known[1]))
