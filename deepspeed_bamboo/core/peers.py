"""Whom a worker talks to in a placement: known to all of them, so that both sides of each pair connect."""

from __future__ import annotations

from collections.abc import Container, Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId

FAN_OUT = 8
"""So many workers at most are below one in the tree through which agreements go."""


def tree_neighbours(
    workers: Sequence[WorkerId], me: WorkerId, *, fan_out: int = FAN_OUT
) -> tuple[WorkerId | None, tuple[WorkerId, ...]]:
    """The worker above ``me`` in the tree (None for the first one), and those below."""
    place = workers.index(me)
    above = workers[(place - 1) // fan_out] if place else None
    first = place * fan_out + 1
    return above, tuple(workers[first : first + fan_out])


def staying_first(members: Sequence[WorkerId], *, leaving: Container[WorkerId]) -> tuple[WorkerId, ...]:
    """``members`` in an order in which whoever stays has nobody of ``leaving`` above it in the tree of agreements.

    One that leaves may be gone once it knows the result, and need not have passed it down.
    """
    stays = [member for member in members if member not in leaving]
    return (*stays, *(member for member in members if member in leaving))


def peers_of(placement: Placement, worker: WorkerId, *, members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """All workers that ``worker`` exchanges messages with in every iteration of ``placement``.

    Those of :func:`tensor_peers`, and those next to it in the tree through which agreements go.
    """
    above, below = tree_neighbours(members, worker)
    through = below if above is None else (above, *below)
    return tuple(sorted({*tensor_peers(placement, worker), *through} - {worker}))


def tensor_peers(placement: Placement, worker: WorkerId) -> tuple[WorkerId, ...]:
    """The workers that ``worker`` exchanges device tensors with in every iteration.

    Owners of neighbour stages (cyclically, for tied layers), of the same stage in other pipelines, and
    owners and holders of shadows.
    """
    grid, owners = placement.grid, dict(placement.owners)
    pairs: set[tuple[WorkerId, WorkerId]] = set()
    for coordinate, owner in owners.items():
        neighbours = [Coordinate(coordinate.pipeline, (coordinate.stage + 1) % grid.stages)]
        neighbours += [Coordinate(other, coordinate.stage) for other in range(grid.pipelines)]
        pairs.update((owner, owners[other]) for other in neighbours)
    pairs.update((owners[coordinate], holder) for coordinate, holder in placement.all_shadows)
    both = pairs | {(b, a) for a, b in pairs}
    return tuple(sorted({b for a, b in both if a == worker} - {worker}))


def peers_after_a_loss(placement: Placement, worker: WorkerId, *, members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """All workers that ``worker`` may have to connect to when any other one is lost, and shadows are made again."""
    found: set[WorkerId] = set()
    for lost in members:
        after, _ = placement.without([lost])
        if lost == worker or after is None:
            continue
        left = tuple(member for member in members if member != lost)
        found.update(peers_of(after, worker, members=left), tensor_peers(after.protected(left), worker))
    return tuple(member for member in members if member in found)
