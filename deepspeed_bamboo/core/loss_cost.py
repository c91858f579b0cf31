"""What losing some workers at once would cost a placement: what is taken over, what can't be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId


@dataclass(frozen=True)
class LossCost:
    """The consequences of one loss. Coordinates are in grid order.

    ``taken_over`` go to the worker of a shadow, ``copied`` to one that has the same stage of another pipeline (only
    where pipelines are alike), ``fatal`` are held by nobody: the last checkpoint is restored (architecture 2).
    ``unprotected`` are those that live on and lose their last shadow only.
    """

    taken_over: tuple[Coordinate, ...]
    copied: tuple[Coordinate, ...]
    fatal: tuple[Coordinate, ...]
    unprotected: tuple[Coordinate, ...]


def loss_cost(placement: Placement, lost: Iterable[WorkerId]) -> LossCost:
    """What the loss of all workers in ``lost`` at once costs."""
    gone = frozenset(lost)
    ownerless = [c for c, worker in placement.owners if worker in gone]
    had = {c for c, _ in placement.shadows}
    protected = {c for c, worker in placement.all_shadows if worker not in gone}
    taken_over = tuple(c for c in ownerless if c in protected)
    stateless = [c for c in ownerless if c not in protected]
    fatal = placement.without(gone)[1] if stateless else ()
    return LossCost(
        taken_over=taken_over,
        copied=tuple(c for c in stateless if c not in fatal),
        fatal=fatal,
        unprotected=tuple(c for c, worker in placement.owners if worker not in gone and c in had - protected),
    )
