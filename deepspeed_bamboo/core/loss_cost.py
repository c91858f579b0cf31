"""What losing some workers at once would cost a placement: what is taken over, what can't be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def fatal_pairs(placement: Placement, groups: Mapping[WorkerId, str]) -> set[frozenset[str]]:
    """Of which two groups of workers the loss at once is fatal; a group whose loss alone is fatal stands by itself.

    ``groups`` names each worker's: itself, its node, its zone.
    """
    holders: dict[Coordinate, set[str]] = {}
    for coordinate, copies in placement.all_copies().items():
        # Where pipelines are alike, any copy of the stage will do.
        key = Coordinate(0, coordinate.stage) if placement.alike else coordinate
        holders.setdefault(key, set()).update(groups[worker] for worker in copies)
    found = {frozenset(its) for its in holders.values() if len(its) <= 2}
    return {its for its in found if not any(other < its for other in found)}


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
