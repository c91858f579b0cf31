"""The fewest neighbouring pairs that must share a node or a zone: a closed formula, and why it is reached.

Legend: the grid is k rings of length L (``Rings``); n = k * L coordinates and as many pairs; h = L // 2.

One ring with m of its coordinates in one domain (node or zone) and the rest elsewhere: each coordinate elsewhere
separates at most two of the L pairs, so at least ``phi(m) = max(0, 2m - L)`` pairs are inside that domain; at most
one domain has m > L / 2, so ``phi`` of the largest is a lower bound for the ring. :func:`arrange` reaches it for
nodes and zones at once.

All rings: ``phi`` is convex, so a domain with M coordinates in all costs least when they are spread evenly over the
rings: nothing up to k * h, then 2 for each further one (L even), or 1 for each of the next k and 2 for each after
that (L odd). Dealing workers out in turn, sorted by zone and node, spreads every domain evenly at the same time. So
with room for C_i coordinates in domain i, and ``short = n - sum(min(C_i, k * h))``, the fewest pairs are

    0 for short <= 0;    2 * short for even L;    2 * short - min(short, k) for odd L.

This is the minimum for nodes. Goal 1 comes before goal 2: where no pair must share a node, no node may take more
than k * h, so that much of its room counts for its zone; where some must, a node that is too large is so in its
zone too, and all room counts. ``placing_check`` finds the same minima by exhaustive search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.placing.sites import Sites


@dataclass(frozen=True)
class Rings:
    """The neighbourhoods of a grid: its pipelines, closed to rings; with one stage, the pipelines as one ring."""

    count: int
    length: int

    @classmethod
    def of(cls, grid: Grid) -> Rings:
        """The rings of ``grid``; one coordinate alone is a ring without pairs."""
        return cls(1, grid.pipelines) if grid.stages == 1 else cls(grid.pipelines, grid.stages)

    @property
    def pairs(self) -> int:
        """Pairs of a coordinate and its predecessor. With two stages both directions count."""
        return self.count * self.length if self.length > 1 else 0

    @property
    def free(self) -> int:
        """k * h: what one domain may host without a pair inside it."""
        return self.count * (self.length // 2) if self.length > 1 else 1

    def inside(self, hosted: int) -> int:
        """The fewest pairs inside a domain that hosts ``hosted`` coordinates."""
        if self.length == 1:
            return 0
        each, more = divmod(hosted, self.count)
        fewer = max(0, 2 * each - self.length) * (self.count - more)
        return fewer + max(0, 2 * each + 2 - self.length) * more


@dataclass(frozen=True)
class Pairs:
    """Pairs of neighbours on one node, and in one zone (those on one node among them). Ordered by importance."""

    node: int
    zone: int


@dataclass(frozen=True)
class Bound:
    """The minimum of both kinds of pairs, and in words why nothing can be below it."""

    pairs: Pairs
    reason: str


def fewest_pairs(grid: Grid, sites: Sites, *, most: int) -> Bound:
    """The provably fewest neighbouring pairs when no worker hosts more than ``most`` coordinates.

    The formula and its proof are at the top of this module.
    """
    rings = Rings.of(grid)
    room = [0] * len(sites.nodes)
    for node in sites.node:
        room[node] += most
    node_pairs = _least(rings, room)
    zone_room = [0] * len(sites.zones)
    for node, places in enumerate(room):
        zone_room[sites.zone_of_node[node]] += places if node_pairs else min(places, rings.free)
    zone_pairs = _least(rings, zone_room)
    reason = "\n".join(
        (_why(rings, room, node_pairs, domain="node"), _why(rings, zone_room, zone_pairs, domain="zone"))
    )
    return Bound(Pairs(node_pairs, zone_pairs), reason)


def count_pairs(grid: Grid, owners: Iterable[tuple[Coordinate, WorkerId]], sites: Sites) -> Pairs:
    """The neighbouring pairs on one node and in one zone. ``owners`` name workers of ``sites`` only."""
    number = {worker: index for index, worker in enumerate(sites.workers)}
    host = {coordinate: number[worker] for coordinate, worker in owners}
    edges = [(host[c], host[grid.predecessor(c)]) for c in grid] if len(grid) > 1 else []
    return Pairs(
        sum(sites.node[one] == sites.node[other] for one, other in edges),
        sum(sites.zone[one] == sites.zone[other] for one, other in edges),
    )


def arrange(workers: Sequence[int], sites: Sites) -> list[int]:
    """The given workers (by number, one for each place) around a ring, with the fewest pairs on a node and in a zone.

    Sorted by domain, the largest first, they fill the even places and then the odd ones: what is next to each other
    is half a ring apart in that order, so only a domain of more than half of the ring meets itself.
    """
    in_node: dict[int, list[int]] = {}
    for worker in workers:
        in_node.setdefault(sites.node[worker], []).append(worker)
    in_zone: dict[int, list[list[int]]] = {}
    for members in sorted(in_node.values(), key=len, reverse=True):
        in_zone.setdefault(sites.zone[members[0]], []).append(members)
    zones = sorted(in_zone.values(), key=lambda nodes: (sum(map(len, nodes)), len(nodes[0])), reverse=True)
    order = [worker for nodes in zones for members in nodes for worker in members]
    ring = [0] * len(order)
    ring[::2] = order[: (len(order) + 1) // 2]
    ring[1::2] = order[(len(order) + 1) // 2 :]
    return ring


def _short(rings: Rings, room: Sequence[int]) -> int:
    return rings.count * rings.length - sum(min(places, rings.free) for places in room)


def _least(rings: Rings, room: Sequence[int]) -> int:
    short = _short(rings, room)
    if short <= 0 or rings.length == 1:
        return 0
    return 2 * short if rings.length % 2 == 0 else 2 * short - min(short, rings.count)


def _why(rings: Rings, room: Sequence[int], pairs: int, *, domain: str) -> str:
    total, short = rings.count * rings.length, _short(rings, room)
    found = f"neighbours on one {domain}" if domain == "node" else f"neighbours in one {domain}"
    if pairs == 0:
        return f"{found}: none"
    domains = f"one {domain}" if len(room) == 1 else f"{len(room)} {domain}s"
    return (
        f"{found}: {pairs} of {rings.pairs} pairs, the fewest possible: {domains} can take {total - short} of the "
        f"{total} coordinates without two neighbours on the same, and the {short} left over make {pairs} pair"
        f"{'' if pairs == 1 else 's'}"
    )
