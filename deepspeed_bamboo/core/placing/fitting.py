"""Owners spread from nothing, fitted to what is where: ring by ring turned, then exchanged within their domains."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_bamboo.core.placing.keeping import keep_most
from deepspeed_bamboo.core.placing.local_search import Task
from deepspeed_bamboo.core.placing.lower_bound import Pairs, Rings


def fit(task: Task, owners: Sequence[int], *, pairs: Pairs) -> list[int]:
    """``owners`` with as many pairs on a node and in a zone, and more bytes that stay. Fast, not the fewest bytes.

    Every ring is turned, and read in the direction, such that the most bytes find a holder in their domain: the zone
    where no ``pairs`` are in one, else the node. Workers of one domain are interchangeable then, so among them the
    most bytes stay, exactly.
    """
    domain = task.sites.node if pairs.zone else task.sites.zone
    length = Rings.of(task.grid).length
    near = [frozenset(domain[w] for w in held) for held in task.held]
    wanted: list[int] = []
    for start in range(0, len(owners), length):
        ring = range(start, start + length)
        wanted += _turned([domain[owners[c]] for c in ring], [near[c] for c in ring], [task.sizes[c] for c in ring])
    within = [[w for w in held if domain[w] == wanted[c]] for c, held in enumerate(task.held)]
    return _completed(task, wanted, keep_most(within, task.sizes, workers=len(task.sites), most=task.most), domain)


def _turned(around: list[int], near: Sequence[frozenset[int]], sizes: Sequence[int]) -> list[int]:
    """The domains of a ring in the direction and turn that keep the most bytes near."""
    best, found = -1, around
    for order in (around, around[::-1]):
        places: dict[int, list[int]] = {}
        for place, domain in enumerate(order):
            places.setdefault(domain, []).append(place)
        staying = [0] * len(order)
        for position, (domains, size) in enumerate(zip(near, sizes, strict=True)):
            for domain in domains:
                for place in places.get(domain, ()):
                    staying[place - position] += size
        turn = max(range(len(staying)), key=staying.__getitem__)
        if staying[turn] > best:
            best, found = staying[turn], order[turn:] + order[:turn]
    return found


def _completed(task: Task, wanted: Sequence[int], kept: Sequence[int], domain: Sequence[int]) -> list[int]:
    """``kept``, and those without an owner on the workers of their domain that host least."""
    members: dict[int, list[int]] = {}
    for worker, its in enumerate(domain):
        members.setdefault(its, []).append(worker)
    owners, load = list(kept), [0] * len(domain)
    for worker in kept:
        if worker >= 0:
            load[worker] += 1
    for coordinate, worker in enumerate(kept):
        if worker < 0:
            owners[coordinate] = min(members[wanted[coordinate]], key=load.__getitem__)
            load[owners[coordinate]] += 1
    return owners
