"""The epoch after a loss, those in which nobody trains, and the failure of a job that lost more than it can bear."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_bamboo.coordination.records import EpochRecord, JobFailure, Roster
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.restoring import rescued


def without_lost(
    current: EpochRecord, leaving: Sequence[WorkerId], *, reason: str, proposer: str
) -> EpochRecord | None:
    """The epoch after ``current`` in which ``leaving`` take no part; None where that ends the job.

    Where nobody alive holds a coordinate any more, and there are checkpoints, survivors bring the state back from one.
    Until that is done a further loss changes only who takes part in it. Where nobody can do that, agents wait.
    """
    members = tuple(worker for worker in current.members if worker not in leaving)
    placement, restoring = current.placement.without(leaving)[0], current.restoring
    if placement is None or restoring >= 0:
        if not (members and current.goes_back):
            return waiting(current, leaving, reason=reason, proposer=proposer) if current.waits_seconds else None
        placement = rescued(current.placement, members)
        restoring = restoring if restoring >= 0 else current.number + 1
    return replace(
        current,
        number=current.number + 1,
        members=members,
        placement=placement,
        reason=reason,
        lost=tuple(leaving),
        proposer=proposer,
        time_seconds=time.time(),
        restoring=restoring,
    )


def waiting(current: EpochRecord, leaving: Sequence[WorkerId], *, reason: str, proposer: str) -> EpochRecord:
    """The epoch after ``current`` in which agents wait for machines. Whoever of its members is left ends, too."""
    return replace(
        current,
        number=current.number + 1,
        members=(),
        reason=reason,
        lost=tuple(leaving),
        proposer=proposer,
        time_seconds=time.time(),
        restoring=-1,
        roster=None,
    )


def starting_anew(current: EpochRecord, roster: Roster, *, proposer: str) -> EpochRecord:
    """The epoch after ``current``, in which agents wait, in which the workers of ``roster`` start."""
    return replace(
        current,
        number=current.number + 1,
        reason="workers start anew",
        lost=(),
        proposer=proposer,
        time_seconds=time.time(),
        generation=roster.generation,
        roster=roster,
    )


def fatal_loss(worker: WorkerId, coordinates: Sequence[Coordinate], why: str, *, stores: bool) -> JobFailure:
    """Nobody holds ``coordinates`` any more since ``worker`` was lost; ``why`` says how that came.

    ``stores``: there are checkpoints in a store.
    """
    names = ", ".join(map(str, coordinates))
    message = f"no live worker holds the state of {names} (pipeline.stage) {why}; {_again(stores)}"
    return JobFailure(worker=worker, kind="fatal_loss", message=message, traceback="")


def lost_data(worker: WorkerId, why: str, *, stores: bool) -> JobFailure:
    """Nobody has the data any more that ``worker`` had, and was lost with. The rest as with :func:`fatal_loss`."""
    return JobFailure(worker=worker, kind="fatal_loss", message=f"{why}; {_again(stores)}", traceback="")


def _again(stores: bool) -> str:
    return (
        "start the same command again, it goes on from the last checkpoint in bamboo.checkpoint.dir"
        if stores
        else "bamboo.checkpoint.dir is not set, so the same command begins at the first step"
    )
