"""Owners from nothing, with the fewest neighbouring pairs: how many each node hosts, dealt out ring by ring."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placing.lower_bound import Rings, arrange
from deepspeed_bamboo.core.placing.sites import Sites


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
    in_zone: list[list[tuple[int, bool, float, int]]] = [[] for _ in zone_room]

    def node_price(node: int) -> tuple[int, bool, float, int]:
        mine = hosted[node]
        return rings.inside(mine + 1) - rings.inside(mine), mine >= wanted[node], mine / room[node], node

    def zone_price(zone: int) -> tuple[int, int, bool, float, float, int]:
        pairs, unwanted, filled, _ = in_zone[zone][0]
        theirs = zone_hosted[zone]
        zone_pairs = rings.inside(theirs + 1) - rings.inside(theirs)
        return pairs, zone_pairs, unwanted, theirs / zone_room[zone], filled, zone

    for node, zone in enumerate(sites.zone_of_node):
        heapq.heappush(in_zone[zone], node_price(node))
    zones = [zone_price(zone) for zone in range(len(zone_room))]
    heapq.heapify(zones)
    for _ in range(rings.count * rings.length):
        zone = heapq.heappop(zones)[-1]
        node = heapq.heappop(in_zone[zone])[-1]
        hosted[node] += 1
        zone_hosted[zone] += 1
        if hosted[node] < room[node]:
            heapq.heappush(in_zone[zone], node_price(node))
        if in_zone[zone]:
            heapq.heappush(zones, zone_price(zone))
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
