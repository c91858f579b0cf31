"""Ranks as a training script sees them: those of the grid, whichever worker stands for them. Pure.

Ranks are those of the coordinates for as long as the job lives. A worker that took stages over stands for their ranks
too. A group that the script made is held by some workers only; a rank whose worker was lost is
represented there if its new owner holds the group, and otherwise not.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from deepspeed_bamboo.core.placement import Placement, WorkerId


def ranks_of(placement: Placement, worker: WorkerId) -> tuple[int, ...]:
    """The ranks that ``worker`` stands for, in order; none for one that stands by."""
    return tuple(sorted(placement.grid.rank(coordinate) for coordinate in placement.hosted_by(worker)))


def own_rank(placement: Placement, worker: WorkerId, *, members: Sequence[WorkerId]) -> int:
    """The one rank that ``worker`` has for itself: the lowest that it stands for.

    Those of ``members`` that stand by have ranks behind the grid's, each another one.
    """
    ranks = ranks_of(placement, worker)
    if ranks:
        return ranks[0]
    idle = [member for member in members if not placement.hosted_by(member)]
    return len(placement.grid) + (idle.index(worker) if worker in idle else len(idle))


def reporter(placement: Placement) -> WorkerId:
    """The worker that prints and writes for all: the one that stands for rank 0."""
    return placement.owner(placement.grid.coordinate(0))


def parties(
    placement: Placement,
    ranks: Sequence[int],
    *,
    homes: Mapping[WorkerId, int],
    holders: Container[WorkerId] | None = None,
) -> dict[int, WorkerId]:
    """Who takes part in a collective of a script's group of ``ranks``, and for which of them, in their order.

    ``homes``: the rank that each worker's script had when it began. ``holders``: the workers that made the group, where
    that was after a loss; None: those at home in it. Left out are ranks whose owner does not hold the group.
    """
    result = {}
    for rank in ranks:
        worker = placement.owner(placement.grid.coordinate(rank))
        at_home = homes.get(worker) in ranks
        if at_home if holders is None else worker in holders:
            result[rank] = worker
    return result
