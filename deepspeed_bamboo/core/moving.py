"""Better owners, step by step: moves, swaps and chains that lower the cost of an assignment.

The cost is one whole number with the goals as its digits, most important first: pairs on a node, pairs in a zone,
bytes moved, owners changed, and the squares of the workers' loads. What is accepted always lowers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.separation import Pairs, Rings, arrange
from deepspeed_bamboo.core.sites import Sites


@dataclass(frozen=True)
class Prices:
    """What one unit of each goal costs; one of the first outweighs all of those after it together."""

    node: int
    zone: int
    byte: int
    change: int

    @classmethod
    def of(cls, coordinates: int, total_bytes: int) -> Prices:
        """Prices for a grid of so many coordinates, with so many bytes of state in all."""
        change = coordinates * coordinates + 1
        byte = change * (coordinates + 1)
        zone = byte * (total_bytes + 1)
        return cls(node=zone * (coordinates + 1), zone=zone, byte=byte, change=change)


@dataclass(frozen=True)
class Task:
    """What is to be placed. Coordinates and workers are numbers: grid order, and the order of ``sites``.

    ``held`` are the workers that hold the state of each coordinate, ``owned`` its live owner or -1; both say nothing
    (empty, -1) when there is no current placement, and then ``sizes`` are 0.
    """

    grid: Grid
    sites: Sites
    most: int
    held: tuple[tuple[int, ...], ...]
    owned: tuple[int, ...]
    sizes: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    prices: Prices

    @classmethod
    def of(
        cls,
        grid: Grid,
        sites: Sites,
        *,
        most: int,
        held: Sequence[tuple[int, ...]],
        owned: Sequence[int],
        sizes: Sequence[int],
    ) -> Task:
        """The task, with neighbours and prices worked out."""
        length = Rings.of(grid).length
        ring = [range(start, start + length) for start in range(0, len(grid), length)]
        neighbours = tuple(
            (around[i - 1], around[(i + 1) % length]) if length > 1 else () for around in ring for i in range(length)
        )
        prices = Prices.of(len(grid), sum(sizes))
        return cls(grid, sites, most, tuple(held), tuple(owned), tuple(sizes), neighbours, prices)

    def pair(self, one: int, other: int) -> int:
        """The price of neighbours on these two workers."""
        sites = self.sites
        if one < 0 or other < 0 or sites.zone[one] != sites.zone[other]:
            return 0
        return self.prices.zone + (self.prices.node if sites.node[one] == sites.node[other] else 0)

    def stay(self, coordinate: int, worker: int) -> int:
        """The price of bytes moved and of a changed owner."""
        if worker == self.owned[coordinate]:
            return 0
        if worker in self.held[coordinate]:
            return self.prices.change
        return self.prices.byte * self.sizes[coordinate] + self.prices.change

    def cost(self, owners: Sequence[int]) -> int:
        """The whole cost of an assignment."""
        load: dict[int, int] = {}
        total = 0
        for coordinate, worker in enumerate(owners):
            load[worker] = load.get(worker, 0) + 1
            total += self.stay(coordinate, worker)
            if self.neighbours[coordinate]:
                total += self.pair(worker, owners[self.neighbours[coordinate][0]])
        return total + sum(count * count for count in load.values())


_Steps = tuple[tuple[int, int], ...]
_ZONES_FOR_CHAINS = 6


class Assignment:
    """Owners being improved. ``owners`` may hold -1 for a coordinate that has none yet; :meth:`fill` settles those.

    ``fewest`` is the minimum of pairs: once it is reached, no more search is made for fewer.
    """

    def __init__(self, task: Task, owners: Sequence[int], *, fewest: Pairs) -> None:
        self.task = task
        self.owners = list(owners)
        self.load = [0] * len(task.sites)
        self._fewest = fewest.node * task.prices.node + fewest.zone * task.prices.zone
        self._pairs = self._all_pairs()
        for worker in self.owners:
            if worker >= 0:
                self.load[worker] += 1

    def fill(self) -> None:
        """Give every coordinate without an owner to the worker with room where it costs least."""
        for coordinate, worker in enumerate(self.owners):
            if worker < 0:
                free = (w for w, load in enumerate(self.load) if load < self.task.most)
                self._put(coordinate, min(free, key=lambda w: (self._price(coordinate, w), self.load[w])))

    def improve(self, *, rounds: int = 8) -> None:
        """Take every step that lowers the cost, until a round finds none or ``rounds`` are over."""
        for _ in range(rounds):
            before = tuple(self.owners)
            for coordinate in self._costly():
                self._step(coordinate)
            for worker in [w for w, load in enumerate(self.load) if load > 1]:
                self._unload(worker)
            if tuple(self.owners) == before:
                break

    def rearrange(self) -> None:
        """Put the workers of every ring with pairs in the order with the fewest, turned so that most can stay."""
        length = Rings.of(self.task.grid).length
        for start in range(0, len(self.owners), length):
            ring = range(start, start + length)
            if any(self._paired(coordinate) for coordinate in ring):
                self._turn(ring)
        self._pairs = self._all_pairs()

    def _turn(self, ring: range) -> None:
        workers = self.owners[ring.start : ring.stop]
        best, found = self._ring_cost(ring, workers), workers
        order = arrange(workers, self.task.sites)
        for around in (order, order[::-1]):
            for turn in range(len(around)):
                turned = around[turn:] + around[:turn]
                cost = self._ring_cost(ring, turned)
                if cost < best:
                    best, found = cost, turned
        self.owners[ring.start : ring.stop] = found

    def _ring_cost(self, ring: range, workers: Sequence[int]) -> int:
        task = self.task
        stay = sum(task.stay(c, w) for c, w in zip(ring, workers, strict=True))
        return stay + sum(task.pair(workers[i - 1], workers[i]) for i in range(len(workers)))

    def _costly(self) -> list[int]:
        """Coordinates beside a neighbour first, then those whose state has to move."""
        prices = {c: self._price(c, w) for c, w in enumerate(self.owners)}
        return sorted((c for c, price in prices.items() if price), key=lambda c: (-prices[c], c))

    def _step(self, coordinate: int) -> None:
        """The one move, swap or chain that lowers the cost most; the wider searches only where they are needed."""
        held = self.task.held[coordinate]
        search = self._paired(coordinate) and self._pairs > self._fewest
        steps, change = self._best_move(coordinate, self._room_like(coordinate) if search else held)
        if not search or -change < self.task.prices.zone:
            others = self._hosted_by(held) if not search else self._far_from(coordinate)
            steps, change = self._best_swap(coordinate, others, steps, change)
            if search and -change < self.task.prices.zone:
                steps, change = self._best_swap(coordinate, range(len(self.owners)), steps, change)
            if change == 0 or (search and -change < self.task.prices.zone):
                steps = self._best_chain(coordinate, others, steps, change)
        for one, worker in steps:
            self._put(one, worker)

    def _best_move(self, coordinate: int, targets: Iterable[int]) -> tuple[_Steps, int]:
        best, steps = 0, _Steps()
        for worker in targets:
            if self.load[worker] < self.task.most and worker != self.owners[coordinate]:
                change = self._move_price(coordinate, worker)
                if change < best:
                    best, steps = change, ((coordinate, worker),)
        return steps, best

    def _best_swap(self, coordinate: int, others: Iterable[int], steps: _Steps, best: int) -> tuple[_Steps, int]:
        for other in others:
            change = self._swap_price(coordinate, other)
            if change < best:
                best = change
                steps = ((coordinate, self.owners[other]), (other, self.owners[coordinate]))
        return steps, best

    def _best_chain(self, coordinate: int, others: Iterable[int], steps: _Steps, best: int) -> _Steps:
        """The best of: ``coordinate`` in the place of another, and that one on a worker with room."""
        room = self._room_by_zone()
        for other in others if room else ():
            place = self.owners[other]
            if place == self.owners[coordinate] or other in self.task.neighbours[coordinate]:
                continue
            first = self._difference(coordinate, place)
            if first >= self.task.prices.zone:
                continue
            holders = [w for w in self.task.held[other] if self.load[w] < self.task.most]
            for worker in (*holders, *room):
                if worker in (place, self.owners[coordinate]):
                    continue
                change = first + self._difference(other, worker) + self._load_price(self.owners[coordinate], worker)
                if change < best:
                    best, steps = change, ((coordinate, place), (other, worker))
        return steps

    def _room_like(self, coordinate: int) -> list[int]:
        """Workers with room: holders of the state, and of those with the same neighbours the one that hosts least."""
        sites, task = self.task.sites, self.task
        near = [self.owners[n] for n in task.neighbours[coordinate]]
        zones = {sites.zone[w] for w in near}
        found: dict[tuple[bool, ...], int] = {}
        for worker, load in enumerate(self.load):
            if load >= task.most:
                continue
            kind: tuple[bool, ...] = ()
            if sites.zone[worker] in zones:
                kind = tuple(
                    x for w in near for x in (sites.zone[w] == sites.zone[worker], sites.node[w] == sites.node[worker])
                )
            if kind not in found or load < self.load[found[kind]]:
                found[kind] = worker
        return [*task.held[coordinate], *found.values()]

    def _room_by_zone(self) -> list[int]:
        """Of a few zones, the worker with room that hosts least."""
        found: dict[int, int] = {}
        for worker, load in enumerate(self.load):
            if load < self.task.most:
                known = found.get(self.task.sites.zone[worker])
                if (known is None and len(found) < _ZONES_FOR_CHAINS) or (
                    known is not None and load < self.load[known]
                ):
                    found[self.task.sites.zone[worker]] = worker
        return list(found.values())

    def _far_from(self, coordinate: int) -> list[int]:
        """Coordinates whose worker would be in no zone of a neighbour of ``coordinate``."""
        zone = self.task.sites.zone
        near = {zone[self.owners[n]] for n in self.task.neighbours[coordinate]}
        return [c for c, worker in enumerate(self.owners) if zone[worker] not in near]

    def _unload(self, worker: int) -> None:
        """Move a coordinate to a worker that hosts less, where that costs nothing of more importance."""
        for coordinate in self._hosted_by((worker,)):
            stays = worker in self.task.held[coordinate]
            for target in self.task.held[coordinate] if stays else range(len(self.load)):
                if self.load[target] + 1 < self.load[worker] and self._move_price(coordinate, target) < 0:
                    self._put(coordinate, target)
                    return

    def _hosted_by(self, workers: Iterable[int]) -> list[int]:
        wanted = frozenset(workers)
        return [c for c, w in enumerate(self.owners) if w in wanted] if wanted else []

    def _put(self, coordinate: int, worker: int) -> None:
        before = self.owners[coordinate]
        if before >= 0:
            self.load[before] -= 1
        for neighbour in self.task.neighbours[coordinate]:
            beside = self.owners[neighbour]
            self._pairs += self.task.pair(worker, beside) - self.task.pair(before, beside)
        self.owners[coordinate] = worker
        self.load[worker] += 1

    def _all_pairs(self) -> int:
        """The price of all pairs; each once, with its predecessor."""
        task, owners = self.task, self.owners
        return sum(task.pair(w, owners[near[0]]) for w, near in zip(owners, task.neighbours, strict=True) if near)

    def _paired(self, coordinate: int) -> bool:
        mine = self.owners[coordinate]
        return any(self.task.pair(mine, self.owners[n]) for n in self.task.neighbours[coordinate])

    def _price(self, coordinate: int, worker: int, *, but: int = -1) -> int:
        """The price of ``coordinate`` on ``worker`` beside its neighbours, ``but`` one of them."""
        task, owners = self.task, self.owners
        price = task.stay(coordinate, worker)
        for neighbour in task.neighbours[coordinate]:
            if neighbour != but:
                price += task.pair(worker, owners[neighbour])
        return price

    def _difference(self, coordinate: int, worker: int) -> int:
        return self._price(coordinate, worker) - self._price(coordinate, self.owners[coordinate])

    def _load_price(self, source: int, target: int) -> int:
        return 0 if source == target else 2 * (self.load[target] - self.load[source]) + 2

    def _move_price(self, coordinate: int, worker: int) -> int:
        return self._difference(coordinate, worker) + self._load_price(self.owners[coordinate], worker)

    def _swap_price(self, one: int, other: int) -> int:
        a, b = self.owners[one], self.owners[other]
        if a == b:
            return 0
        after = self._price(one, b, but=other) + self._price(other, a, but=one)
        return after - self._price(one, a, but=other) - self._price(other, b, but=one)
