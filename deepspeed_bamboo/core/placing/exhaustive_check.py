"""Checks of placing by exhaustive search, for small cases: it knows no bound and follows no cleverness.

Every way to host the coordinates is tried. Only what can't matter is merged: nodes of a zone with equal room, and
zones with equal nodes, are interchangeable, and the rest of a search depends on how much room is left only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.lower_bound import Pairs, Rings, count_pairs
from deepspeed_bamboo.core.placing.sites import Sites

# A node's room, and whether it hosts the previous and the first coordinate of the ring; nodes of a zone; zones.
_Node = tuple[int, bool, bool]
_State = tuple[tuple[_Node, ...], ...]


def true_fewest_pairs(grid: Grid, sites: Sites, *, most: int) -> Pairs:
    """The minimum of pairs on one node, then in one zone, over all ways to host ``grid`` with ``most`` a worker.

    Raises ValueError when there is not room for all coordinates.
    """
    if most * len(sites) < len(grid):
        raise ValueError(f"{len(sites)} workers with {most} places each for {len(grid)} coordinates; allow more each")
    rings = Rings.of(grid)
    room = [0] * len(sites.nodes)
    for node in sites.node:
        room[node] += most
    zones: list[list[_Node]] = [[] for _ in sites.zones]
    for node, places in enumerate(room):
        zones[sites.zone_of_node[node]].append((places, False, False))

    @cache
    def search(state: _State, left: int, position: int) -> tuple[int, int] | None:
        if left == 0:
            return 0, 0
        found = (_sum(cost, search(after, left - 1, (position + 1) % rings.length))
                 for cost, after in _choices(state, position, rings.length))  # fmt: skip
        return min((one for one in found if one is not None), default=None)

    best = search(_canonical(zones), len(grid), 0)
    if best is None:
        raise ValueError(f"no way to host {len(grid)} coordinates on {len(sites)} workers was found; report this")
    return Pairs(*best)


def all_owners(grid: Grid, sites: Sites, *, most: int) -> Iterator[dict[Coordinate, WorkerId]]:
    """Every way to give each coordinate an owner, without merging anything; for very small cases."""
    coordinates = tuple(grid)
    for chosen in itertools.product(sites.workers, repeat=len(coordinates)):
        if max(map(chosen.count, chosen)) <= most:
            yield dict(zip(coordinates, chosen, strict=True))


def true_best(
    grid: Grid,
    sites: Sites,
    *,
    most: int,
    current: Placement | None = None,
    bytes_of: Callable[[Coordinate], int] = lambda _: 1,
) -> tuple[int, int, int]:
    """The minimum of (pairs on a node, pairs in a zone, bytes moved to owners), in that order, by trying all."""
    held: Mapping[Coordinate, Sequence[WorkerId]] = holders(current)

    def cost(owners: Mapping[Coordinate, WorkerId]) -> tuple[int, int, int]:
        pairs = count_pairs(grid, owners.items(), sites)
        moved = sum(bytes_of(c) for c, w in owners.items() if current is not None and w not in held[c])
        return pairs.node, pairs.zone, moved

    return min(cost(owners) for owners in all_owners(grid, sites, most=most))


def holders(current: Placement | None) -> dict[Coordinate, tuple[WorkerId, ...]]:
    """Who has the state of each coordinate: its owner, then the workers of its shadows."""
    return {} if current is None else current.all_copies()


def _choices(state: _State, position: int, length: int) -> Iterator[tuple[tuple[int, int], _State]]:
    """Every node that can host the next coordinate: the pairs that this makes, and the state after it."""
    closes = length > 1 and position == length - 1
    for z, zone in enumerate(state):
        for n, (room, previous, first) in enumerate(zone):
            if room == 0:
                continue
            node_pairs = zone_pairs = 0
            if position > 0:
                node_pairs += previous
                zone_pairs += any(node[1] for node in zone)
            if closes:
                node_pairs += first
                zone_pairs += any(node[2] for node in zone)
            zones = [[(one[0], False, one[2] and not closes) for one in nodes] for nodes in state]
            zones[z][n] = (room - 1, not closes and length > 1, (first or position == 0) and not closes and length > 1)
            yield (node_pairs, zone_pairs), _canonical(zones)


def _canonical(zones: Sequence[Sequence[_Node]]) -> _State:
    return tuple(sorted(tuple(sorted(nodes)) for nodes in zones))


def _sum(cost: tuple[int, int], rest: tuple[int, int] | None) -> tuple[int, int] | None:
    return None if rest is None else (cost[0] + rest[0], cost[1] + rest[1])
