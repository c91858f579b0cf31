"""After a loss: where every coordinate starts again, from what the survivors report."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress, shadow_progress

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


def progress_after_loss(
    before: Placement,
    after: Placement,
    *,
    progress: Mapping[Coordinate, CoordinateProgress],
    stored: Mapping[Coordinate, CoordinateProgress],
) -> tuple[dict[Coordinate, CoordinateProgress], dict[Coordinate, CoordinateProgress]]:
    """As ``progress_by_holders``, for callers who know how far all of ``before`` was: its coordinates and its shadows.

    Every worker that ``after`` has reports what it held. Raises ValueError when the progress of a coordinate whose
    owner is alive is missing.
    """
    alive = frozenset(after.holders)
    missing = [str(c) for c, owner in before.owners if owner in alive and c not in progress]
    if missing:
        raise ValueError(f"no progress reported for {', '.join(missing)}, whose owners are alive; each must report")
    return progress_by_holders(
        after,
        owned={worker: {c: progress[c] for c in before.hosted_by(worker)} for worker in alive},
        stored={worker: {c: stored[c] for c, w in before.shadows if w == worker and c in stored} for worker in alive},
    )
