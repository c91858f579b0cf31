"""Better owners, step by step: moves, swaps and chains that lower the cost of an assignment.

The cost is one whole number with the goals as its digits, most important first: pairs on a node, pairs in a zone,
bytes moved, owners changed, and the squares of the workers' loads. What is accepted always lowers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placing.lower_bound import Pairs, Rings, arrange
from deepspeed_bamboo.core.placing.sites import Sites


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
_FAR = (-1, -1)
# Once the best of so many places takes a pair apart, no further ones are looked at.
_PLACES = 48
# Prices that one assignment may work out: a fraction of a second. Counted, so that every worker finds the same.
_PRICES = 80_000


class Assignment:
    """Owners being improved. ``owners`` may hold -1 for a coordinate that has none yet; :meth:`fill` settles those.

    ``fewest`` is the minimum of pairs: once it is reached, no more search is made for fewer. The search is a bounded
    one (``_PLACES``, ``_PRICES``): small grids never meet the limits, large ones may end with more pairs or bytes
    than need be, which is for the caller to see.
    """

    def __init__(self, task: Task, owners: Sequence[int], *, fewest: Pairs) -> None:
        self.task = task
        self.owners = list(owners)
        self.load = [0] * len(task.sites)
        self._fewest = fewest.node * task.prices.node + fewest.zone * task.prices.zone
        self._left = _PRICES
        self._leaves = [task.prices.byte * size + task.prices.change for size in task.sizes]
        self._smallest = sorted(range(len(self.owners)), key=lambda c: (task.sizes[c], c))
        self._held_by: list[list[int]] = [[] for _ in self.load]
        for coordinate, held in enumerate(task.held):
            for worker in held:
                self._held_by[worker].append(coordinate)
        self._count()

    def _count(self) -> None:
        """Work out all that follows from ``owners``: loads, who hosts what, zones and prices."""
        task, owners = self.task, self.owners
        self.load[:] = [0] * len(self.load)
        self._hosted: list[list[int]] = [[] for _ in self.load]
        for coordinate, worker in enumerate(owners):
            if worker >= 0:
                self.load[worker] += 1
                self._hosted[worker].append(coordinate)
        self._zone = [task.sites.zone[w] if w >= 0 else -1 for w in owners]
        self._node = [task.sites.node[w] if w >= 0 else -1 for w in owners]
        self._now = [self._price(c, w) if w >= 0 else 0 for c, w in enumerate(owners)]
        # All pairs; each once, with its predecessor.
        predecessors = [near[0] if near else -1 for near in task.neighbours]
        self._pairs = sum(task.pair(owners[c], owners[before]) for c, before in enumerate(predecessors) if before >= 0)
        self._free = {w for w, load in enumerate(self.load) if load < task.most}
        self._room: list[int] | None = None

    @property
    def reached(self) -> bool:
        """Whether the pairs are the fewest."""
        return self._pairs == self._fewest

    def fill(self) -> None:
        """Give every coordinate without an owner to the worker with room where it costs least."""
        for coordinate, worker in enumerate(self.owners):
            if worker < 0:
                free = [w for w in self._room_like(coordinate) if self.load[w] < self.task.most]
                self._put(coordinate, min(free, key=lambda w: (self._price(coordinate, w), self.load[w])))

    def improve(self, *, rounds: int = 8) -> None:
        """Take every step that lowers the cost, until a round finds none or ``rounds`` or prices are used up."""
        for _ in range(rounds):
            before = tuple(self.owners)
            for coordinate in self._costly():
                if self._left <= 0:
                    return
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
        self._count()

    def _turn(self, ring: range) -> None:
        workers = self.owners[ring.start : ring.stop]
        best, found = self._ring_cost(ring, workers), workers
        order = arrange(workers, self.task.sites)
        for around in (order, order[::-1]):
            saved = self._saved_by_turns(ring, around)
            turn = max(range(len(saved)), key=saved.__getitem__)
            turned = around[turn:] + around[:turn]
            cost = self._ring_cost(ring, turned)
            if cost < best:
                best, found = cost, turned
        self.owners[ring.start : ring.stop] = found

    def _saved_by_turns(self, ring: range, around: Sequence[int]) -> list[int]:
        """For every turn of ``around``, what is saved as holders meet coordinates that they hold."""
        places: dict[int, list[int]] = {}
        for place, worker in enumerate(around):
            places.setdefault(worker, []).append(place)
        saved = [0] * len(around)
        for position, coordinate in enumerate(ring):
            for worker in set(self.task.held[coordinate]):
                for place in places.get(worker, ()):
                    saved[place - position] += self._leaves[coordinate] - self.task.stay(coordinate, worker)
        return saved

    def _ring_cost(self, ring: range, workers: Sequence[int]) -> int:
        task = self.task
        stay = sum(task.stay(c, w) for c, w in zip(ring, workers, strict=True))
        return stay + sum(task.pair(workers[i - 1], workers[i]) for i in range(len(workers)))

    def _costly(self) -> list[int]:
        """Coordinates beside a neighbour first, then those whose state has to move."""
        prices = list(self._now)
        return sorted((c for c, price in enumerate(prices) if price), key=lambda c: (-prices[c], c))

    def _step(self, coordinate: int) -> None:
        """The one move, swap or chain that lowers the cost most; the wider searches only where they are needed."""
        held = self.task.held[coordinate]
        enough = -self.task.prices.zone
        if self._paired(coordinate) and self._pairs > self._fewest:
            steps, change = self._best_move(coordinate, self._room_like(coordinate))
            if change > enough:
                others = self._far_from(coordinate)
                steps, change = self._best_swap(coordinate, self._welcoming(coordinate, others), steps, change)
                if change > enough:
                    steps, change = self._best_swap(coordinate, self._smallest, steps, change)
                if change > enough:
                    steps = self._best_chain(coordinate, others, steps, change)
        else:
            steps, change = self._best_move(coordinate, held)
            others = self._hosted_by(held)
            steps, change = self._best_swap(coordinate, others, steps, change)
            if change == 0:
                steps = self._best_chain(coordinate, others, steps, change)
        for one, worker in steps:
            self._put(one, worker)

    def _best_move(self, coordinate: int, targets: Iterable[int]) -> tuple[_Steps, int]:
        best, steps = 0, _Steps()
        for worker in targets:
            if self.load[worker] < self.task.most and worker != self.owners[coordinate]:
                self._left -= 1
                change = self._move_price(coordinate, worker)
                if change < best:
                    best, steps = change, ((coordinate, worker),)
        return steps, best

    def _best_swap(self, coordinate: int, others: Iterable[int], steps: _Steps, best: int) -> tuple[_Steps, int]:
        """The best of ``steps`` and swaps with ``others``; after ``_PLACES`` of them one that parts a pair will do."""
        enough = -self.task.prices.zone
        for tried, other in enumerate(others):
            if tried >= _PLACES and (best <= enough or self._left <= 0):
                break
            self._left -= 1
            change = self._swap_price(coordinate, other)
            if change < best:
                best = change
                steps = ((coordinate, self.owners[other]), (other, self.owners[coordinate]))
        return steps, best

    def _best_chain(self, coordinate: int, others: Sequence[int], steps: _Steps, best: int) -> _Steps:
        """The best of: ``coordinate`` in the place of another, and that one on a worker with room."""
        room = self._room_by_zone() if others else []
        zone, most, mine = self.task.prices.zone, self.task.most, self.owners[coordinate]
        for tried, other in enumerate(others if room else ()):
            if tried >= _PLACES and (best <= -zone or self._left <= 0):
                break
            self._left -= 1
            place = self.owners[other]
            if place == mine or other in self.task.neighbours[coordinate]:
                continue
            first = self._difference(coordinate, place)
            if first >= zone or first - self._now[other] >= best:
                continue
            holders = [w for w in self.task.held[other] if self.load[w] < most]
            for worker in (*holders, *room):
                if worker in (place, mine):
                    continue
                self._left -= 1
                change = first + self._difference(other, worker) + self._load_price(mine, worker)
                if change < best:
                    best, steps = change, ((coordinate, place), (other, worker))
        return steps

    def _room_like(self, coordinate: int) -> list[int]:
        """Workers with room: holders of the state, and of those with the same neighbours the one that hosts least."""
        sites, near, load = self.task.sites, self.task.neighbours[coordinate], self.load
        zones, nodes = {self._zone[n] for n in near}, {self._node[n] for n in near}
        found: dict[tuple[int, int], int] = {}
        for worker in sorted(self._free):
            zone, node = sites.zone[worker], sites.node[worker]
            kind = _FAR if zone not in zones else (zone, node if node in nodes else -1)
            if kind not in found or load[worker] < load[found[kind]]:
                found[kind] = worker
        return [*self.task.held[coordinate], *found.values()]

    def _room_by_zone(self) -> list[int]:
        """Of a few zones, the worker with room that hosts least."""
        if self._room is None:
            found: dict[int, int] = {}
            for worker in sorted(self._free):
                zone = self.task.sites.zone[worker]
                if zone in found or len(found) < _ZONES_FOR_CHAINS:
                    found[zone] = min(found.get(zone, worker), worker, key=self.load.__getitem__)
            self._room = list(found.values())
        return self._room

    def _far_from(self, coordinate: int) -> list[int]:
        """Coordinates whose worker is in no zone of a neighbour of ``coordinate``, those that cost something first."""
        zone, now = self._zone, self._now
        near = {zone[n] for n in self.task.neighbours[coordinate]}
        found = [c for c in self._smallest if zone[c] not in near]
        return [c for c in found if now[c]] + [c for c in found if not now[c]]

    def _welcoming(self, coordinate: int, others: Sequence[int]) -> list[int]:
        """Those of ``others`` with no neighbour in the zone of ``coordinate``, those it holds the state of first."""
        zone, near = self._zone, self.task.neighbours
        mine = zone[coordinate]
        found = [c for c in others if zone[near[c][0]] != mine and zone[near[c][1]] != mine]
        known = set(self._held_by[self.owners[coordinate]]).union(self._hosted_by(self.task.held[coordinate]))
        return [c for c in found if c in known] + [c for c in found if c not in known]

    def _unload(self, worker: int) -> None:
        """Move a coordinate to a worker that hosts less, where that costs nothing of more importance."""
        load = self.load
        if min(load) + 1 >= load[worker]:
            return
        for coordinate in sorted(self._hosted[worker]):
            held = self.task.held[coordinate]
            for target in held if worker in held else range(len(load)):
                if load[target] + 1 < load[worker]:
                    self._left -= 1
                    if self._move_price(coordinate, target) < 0:
                        self._put(coordinate, target)
                        return

    def _hosted_by(self, workers: Iterable[int]) -> list[int]:
        return sorted({c for worker in workers for c in self._hosted[worker]})

    def _put(self, coordinate: int, worker: int) -> None:
        before, near = self.owners[coordinate], self.task.neighbours[coordinate]
        if before >= 0:
            self.load[before] -= 1
            self._hosted[before].remove(coordinate)
            if self.load[before] < self.task.most:
                self._free.add(before)
        for neighbour in near:
            beside = self.owners[neighbour]
            self._pairs += self.task.pair(worker, beside) - self.task.pair(before, beside)
        self.owners[coordinate] = worker
        self.load[worker] += 1
        self._hosted[worker].append(coordinate)
        if self.load[worker] >= self.task.most:
            self._free.discard(worker)
        self._zone[coordinate], self._node[coordinate] = self.task.sites.zone[worker], self.task.sites.node[worker]
        for one in (coordinate, *near):
            if self.owners[one] >= 0:
                self._now[one] = self._price(one, self.owners[one])
        self._room = None

    def _paired(self, coordinate: int) -> bool:
        mine = self._zone[coordinate]
        return any(self._zone[n] == mine for n in self.task.neighbours[coordinate])

    def _price(self, coordinate: int, worker: int, *, but: int = -1) -> int:
        """The price of ``coordinate`` on ``worker`` beside its neighbours, ``but`` one of them."""
        task = self.task
        if worker == task.owned[coordinate]:
            price = 0
        elif worker in task.held[coordinate]:
            price = task.prices.change
        else:
            price = self._leaves[coordinate]
        zone = task.sites.zone[worker]
        for neighbour in task.neighbours[coordinate]:
            if self._zone[neighbour] == zone and neighbour != but:
                price += task.prices.zone
                if self._node[neighbour] == task.sites.node[worker]:
                    price += task.prices.node
        return price

    def _difference(self, coordinate: int, worker: int) -> int:
        return self._price(coordinate, worker) - self._now[coordinate]

    def _load_price(self, source: int, target: int) -> int:
        return 0 if source == target else 2 * (self.load[target] - self.load[source]) + 2

    def _move_price(self, coordinate: int, worker: int) -> int:
        return self._difference(coordinate, worker) + self._load_price(self.owners[coordinate], worker)

    def _swap_price(self, one: int, other: int) -> int:
        a, b = self.owners[one], self.owners[other]
        if a == b:
            return 0
        if other not in self.task.neighbours[one]:
            return self._price(one, b) + self._price(other, a) - self._now[one] - self._now[other]
        after = self._price(one, b, but=other) + self._price(other, a, but=one)
        return after - self._price(one, a, but=other) - self._price(other, b, but=one)
