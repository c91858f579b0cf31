"""Owners from nothing, with the fewest neighbouring pairs: how many each node hosts, dealt out ring by ring."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.separation import Rings, arrange
from deepspeed_bamboo.core.sites import Sites


def spread(grid: Grid, sites: Sites, *, most: int, kept: Sequence[int] = ()) -> list[int]:
    """The number of a worker for every coordinate, in grid order, with the fewest pairs (see ``separation``).

    No worker gets more than ``most``. ``kept`` says for every node how many coordinates it would like, as it
    hosts them now; that decides among equals only.
    """
    rings = Rings.of(grid)
    hosted = _shares(rings, sites, most=most, kept=kept)
    order = _dealing_order(sites, hosted)
    owners: list[int] = []
    for ring in range(rings.count):
        owners += arrange(order[ring :: rings.count], sites)
    return owners


def _shares(rings: Rings, sites: Sites, *, most: int, kept: Sequence[int]) -> list[int]:
    """How many coordinates each node hosts.

    One after the other goes where it adds the fewest pairs on a node, then in a zone. As the costs are convex and
    zones contain whole nodes (a laminar family), this greedy choice is the minimum of their sum.
    """
    room, zone_room = [0] * len(sites.nodes), [0] * len(sites.zones)
    for node, zone in zip(sites.node, sites.zone, strict=True):
        room[node] += most
        zone_room[zone] += most
    hosted, zone_hosted = [0] * len(room), [0] * len(zone_room)
    wanted = kept or [0] * len(room)

    def price(node: int) -> tuple[int, int, bool, float, float, int]:
        zone, mine = sites.zone_of_node[node], hosted[node]
        theirs = zone_hosted[zone]
        return (
            rings.inside(mine + 1) - rings.inside(mine),
            rings.inside(theirs + 1) - rings.inside(theirs),
            mine >= wanted[node],
            theirs / zone_room[zone],
            mine / room[node],
            node,
        )

    # Prices only rise, so an outdated one in the heap is too low and is found out when it comes up.
    heap = [price(node) for node in range(len(room))]
    heapq.heapify(heap)
    for _ in range(rings.count * rings.length):
        while True:
            node = heap[0][-1]
            now = price(node)
            if now == heap[0]:
                break
            heapq.heapreplace(heap, now)
        hosted[node] += 1
        zone_hosted[sites.zone_of_node[node]] += 1
        if hosted[node] < room[node]:
            heapq.heapreplace(heap, price(node))
        else:
            heapq.heappop(heap)
    return hosted


def _dealing_order(sites: Sites, hosted: Sequence[int]) -> list[int]:
    """Workers sorted by zone and node, each as often as it hosts a coordinate; even within a node."""
    members: list[list[int]] = [[] for _ in hosted]
    for worker, node in enumerate(sites.node):
        members[node].append(worker)
    order: list[int] = []
    for node in sorted(range(len(hosted)), key=lambda node: sites.zone_of_node[node]):
        each, more = divmod(hosted[node], len(members[node]))
        for position, worker in enumerate(members[node]):
            order += [worker] * (each + (position < more))
    return order
