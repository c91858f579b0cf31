"""What is left of an iteration after a loss in it, and how long that takes: the plan's own order, with measured times.

Who takes a lost stage over does again what the lost worker had done of it; the others go on where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.progress import CoordinateProgress, shadow_progress
from deepspeed_bamboo.core.timing import Profile, timed_passes

Done = Mapping[Coordinate, tuple[int, int]]
"""Of every coordinate how many backwards and forwards are over."""


def remaining_seconds(
    before: Placement, after: Placement, profile: Profile, *, micro_batches: int, at_seconds: float, eager: bool = False
) -> float:
    """Seconds from the moment at which all go on to the last pass of the interrupted iteration.

    Args:
        before: the placement in which the iteration began.
        after: the placement without the lost workers. Stages whose owner differs are the lost ones.
        profile: durations of passes.
        micro_batches: of each pipeline.
        at_seconds: when the loss came, counted from the first pass. A pass that had not ended then is done again.
        eager: shadows have the forwards of their stage already, so only backwards are done again.
    """
    done = done_by(timed_passes(before, profile, micro_batches=micro_batches), before.grid, at_seconds=at_seconds)
    progress = progress_after(done, before, after, eager=eager)
    left = timed_passes(after, profile, micro_batches=micro_batches, progress=progress)
    return max((end for _, end in left), default=0.0)


def done_by(passes: Iterable[tuple[Instruction, float]], grid: Grid, *, at_seconds: float) -> Done:
    """What is over at a moment of an iteration, whose ``passes`` come with the seconds at which they end."""
    done: dict[Coordinate, list[int]] = {coordinate: [0, 0] for coordinate in grid}
    for instruction, end in passes:
        if end <= at_seconds and instruction.coordinate is not None:
            done[instruction.coordinate][instruction.op is Op.FNC] += 1
    return {coordinate: (backwards, forwards) for coordinate, (backwards, forwards) in done.items()}


def progress_after(
    done: Done, before: Placement, after: Placement, *, eager: bool
) -> dict[Coordinate, CoordinateProgress]:
    """From where each coordinate goes on after a loss. Arguments as those of :func:`remaining_seconds`."""
    owners_before, owners_after = dict(before.owners), dict(after.owners)
    last = before.grid.stages - 1
    progress = {}
    for coordinate, (backwards, forwards) in done.items():
        lost = owners_before[coordinate] != owners_after[coordinate]
        kept = (forwards if eager else 0, 0) if lost else (forwards, backwards)
        counts = CoordinateProgress(forwards=kept[0], backwards=kept[1])
        progress[coordinate] = shadow_progress(coordinate, counts, last_stage=last)
    return progress
