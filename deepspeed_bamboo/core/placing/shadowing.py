"""Where shadows go: with the predecessor (architecture 2), unless the owner's zone or node would take both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.placing.sites import Sites


def choose_shadows(
    grid: Grid, owners: Mapping[Coordinate, WorkerId], sites: Sites, *, held: Mapping[Coordinate, Sequence[WorkerId]]
) -> dict[Coordinate, WorkerId]:
    """A worker for the shadow of every coordinate; none when there is one worker only.

    The shadow is in another zone than its owner if any worker is, else on another node if any is, else on another
    worker. As far as that allows it is with the predecessor's owner, else with a worker that has the state already
    (``held``), else with the one that holds least; standbys count too. So where there are two zones, no loss of a
    single zone takes an owner and its shadow, however unevenly the workers are spread.
    """
    number = {worker: index for index, worker in enumerate(sites.workers)}
    holding = [0] * len(sites)
    for worker in owners.values():
        holding[number[worker]] += 1
    required = _best_distance(sites)
    shadows: dict[Coordinate, int] = {}
    open_ones = []
    for coordinate in grid:
        preferred = number[owners[grid.predecessor(coordinate)]]
        if required and _distance(sites, number[owners[coordinate]], preferred) >= required:
            shadows[coordinate] = preferred
            holding[preferred] += 1
        elif required:
            open_ones.append(coordinate)
    for coordinate in open_ones:
        owner = number[owners[coordinate]]
        present = [number[worker] for worker in held.get(coordinate, ()) if worker in number]
        chosen = _lightest(sites, owner, present, holding, required)
        if chosen is None:
            chosen = _lightest(sites, owner, range(len(sites)), holding, required)
        if chosen is not None:
            shadows[coordinate] = chosen
            holding[chosen] += 1
    return {coordinate: sites.workers[shadows[coordinate]] for coordinate in grid if coordinate in shadows}


def _distance(sites: Sites, one: int, other: int) -> int:
    """3 in different zones, 2 on different nodes, 1 on different workers, 0 for the same."""
    if sites.zone[one] != sites.zone[other]:
        return 3
    return 2 if sites.node[one] != sites.node[other] else int(one != other)


def _best_distance(sites: Sites) -> int:
    if len(sites.zones) > 1:
        return 3
    return 2 if len(sites.nodes) > 1 else int(len(sites) > 1)


def _lightest(sites: Sites, owner: int, candidates: Sequence[int], holding: Sequence[int], required: int) -> int | None:
    far = (worker for worker in candidates if _distance(sites, owner, worker) >= required)
    return min(far, key=lambda worker: holding[worker], default=None)
