"""After a loss: where every coordinate starts again, from what the survivors report."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress, shadow_progress


def progress_after_loss(
    placement_before: Placement,
    placement_after: Placement,
    reports: Mapping[Coordinate, CoordinateProgress],
    redundant_forwards: Mapping[Coordinate, int] | None = None,
    redundant_backwards: Mapping[Coordinate, int] | None = None,
) -> dict[Coordinate, CoordinateProgress]:
    """Where each coordinate goes on after the workers that ``placement_after`` lacks are lost.

    Survivors keep what they report. A coordinate with a new owner starts from its shadow: at the number of
    stored FRC (and BRC) results given for it, which is 0 in the modes that keep none. One that goes to anybody else
    (its second shadow's worker) starts from nothing.
    Raises ValueError when a survivor's report is missing.
    """
    forwards, backwards = redundant_forwards or {}, redundant_backwards or {}
    before, last_stage = dict(placement_before.owners), placement_before.grid.stages - 1
    shadows = dict(placement_before.shadows)
    missing = [str(c) for c, owner in placement_after.owners if before[c] == owner and c not in reports]
    if missing:
        raise ValueError(f"no progress reported for {', '.join(missing)}, whose owners are alive; each must report")
    return {
        c: reports[c]
        if before[c] == owner
        else shadow_progress(
            c,
            CoordinateProgress(forwards=forwards.get(c, 0), backwards=backwards.get(c, 0))
            if shadows.get(c) == owner
            else CoordinateProgress(),
            last_stage=last_stage,
        )
        for c, owner in placement_after.owners
    }


Counts = Mapping[WorkerId, Mapping[Coordinate, CoordinateProgress]]


def progress_by_holders(
    after: Placement, *, owned: Counts, stored: Counts
) -> tuple[dict[Coordinate, CoordinateProgress], dict[Coordinate, CoordinateProgress]]:
    """How far each coordinate of ``after`` is, and each shadow, by what the worker says that has it.

    ``owned`` is what each survivor has reported of coordinates that it owned, ``stored`` of shadows of which it would
    have become the owner next. A worker that took a coordinate over in an epoch that others have not entered reports it
    as its own already, others as the shadow that it was to them; so nothing here depends on who was the owner before.
    What its worker says nothing of starts from nothing.
    """
    nothing, last_stage = CoordinateProgress(), after.grid.stages - 1
    progress = {}
    for coordinate, owner in after.owners:
        known = owned.get(owner, {}).get(coordinate)
        if known is None:
            kept = stored.get(owner, {}).get(coordinate, nothing)
            known = shadow_progress(coordinate, kept, last_stage=last_stage)
        progress[coordinate] = known
    shadows = {c: stored[w][c] for c, w in after.shadows if c in stored.get(w, {})}
    return progress, shadows


def redundant_after_loss(
    placement_before: Placement, placement_after: Placement, redundant: Mapping[Coordinate, CoordinateProgress]
) -> dict[Coordinate, CoordinateProgress]:
    """What the shadows that stay where they are have done; the others start from nothing."""
    before = dict(placement_before.shadows)
    return {c: redundant[c] for c, worker in placement_after.shadows if before.get(c) == worker and c in redundant}
