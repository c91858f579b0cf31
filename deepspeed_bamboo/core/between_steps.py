"""Which stages nobody had while scripts were between two calls of the engine. Pure.

Survivors take a lost worker's stages over when they wait for something the next time, or when a call of the engine
returns. What a script computes before that, from its parameters or by its rank, lacks those stages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from deepspeed_bamboo.core.consensus import Conclusion
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress


class Missing(NamedTuple):
    """``coordinates`` had nobody for a while; ``certain``: between two calls, and not maybe just after."""

    coordinates: tuple[Coordinate, ...]
    certain: bool


def missing(conclusion: Conclusion, *, before: Placement, lost: Collection[WorkerId]) -> Missing:
    """What ``lost`` hosted in ``before`` and may have taken with them before the newest activity began.

    An activity that is agreed had everybody in it. An iteration or evaluation that is not had those of whom somebody
    has received something; of the others nobody knows.
    """
    hosted = {worker: before.hosted_by(worker) for worker in lost}
    if conclusion.decided:
        return Missing((), certain=False)
    within = conclusion.kind in ("train", "evaluate")
    gone = [w for w, its in hosted.items() if not (within and any(_was_heard_of(c, conclusion) for c in its))]
    return Missing(tuple(sorted(c for worker in gone for c in hosted[worker])), certain=not within)


def _was_heard_of(coordinate: Coordinate, conclusion: Conclusion) -> bool:
    """Whether a neighbour has received something from it in the newest activity."""
    nothing = CoordinateProgress()
    after = conclusion.progress.get(Coordinate(coordinate.pipeline, coordinate.stage + 1), nothing)
    previous = conclusion.progress.get(Coordinate(coordinate.pipeline, coordinate.stage - 1), nothing)
    return bool(after.activations_received or previous.gradients_received)
