"""Fewest bytes moved, proven: a search of all owners with the fewest pairs, cut off by bounds and by a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed_bamboo.core.placing.local_search import Task
from deepspeed_bamboo.core.placing.lower_bound import Pairs, Rings


class Proof:
    """A depth-first search for cheaper owners than the ones known. One object searches once.

    Args:
        task: what is to be placed.
        pairs: the minimum of pairs; owners with more are not looked at.
        budget: how many choices may be tried; counted, not timed, so that every worker finds the same.
    """

    def __init__(self, task: Task, *, pairs: Pairs, budget: int) -> None:
        self._task = task
        self._pair_price = pairs.node * task.prices.node + pairs.zone * task.prices.zone
        self._budget = budget
        self._length = Rings.of(task.grid).length
        self._load = [0] * len(task.sites)
        self._owners: list[int] = []
        self._best: list[int] = []
        self._best_price = 0
        self._useful = frozenset(worker for held in task.held for worker in held)
        cheapest = [
            min((task.stay(c, w) for w in held), default=task.prices.byte * task.sizes[c] + task.prices.change)
            for c, held in enumerate(task.held)
        ]
        self._still = [sum(cheapest[c:]) for c in range(len(cheapest) + 1)]

    def search(self, known: Sequence[int]) -> tuple[list[int], bool]:
        """The cheapest owners found (``known`` if none are cheaper), and whether nothing cheaper can exist."""
        task = self._task
        stay = sum(task.stay(c, w) for c, w in enumerate(known))
        self._best, self._best_price = list(known), stay
        self._descend(0, 0)
        return self._best, self._budget > 0

    def _descend(self, pairs: int, stay: int) -> None:
        coordinate = len(self._owners)
        if coordinate == len(self._still) - 1:
            self._best, self._best_price = list(self._owners), stay
            return
        for worker in self._choices(coordinate):
            self._budget -= 1
            if self._budget <= 0:
                return
            more = pairs + self._new_pairs(coordinate, worker)
            price = stay + self._task.stay(coordinate, worker)
            if more > self._pair_price or price + self._still[coordinate + 1] >= self._best_price:
                continue
            self._owners.append(worker)
            self._load[worker] += 1
            self._descend(more, price)
            self._load[worker] -= 1
            self._owners.pop()

    def _choices(self, coordinate: int) -> Iterator[int]:
        """Workers with room, cheapest first; of those that are alike in all that matters only one."""
        task = self._task
        seen: set[tuple[int, int]] = set()
        for worker in sorted(range(len(self._load)), key=lambda w: task.stay(coordinate, w)):
            if self._load[worker] >= task.most:
                continue
            if worker not in self._useful:
                kind = task.sites.node[worker], self._load[worker]
                if kind in seen:
                    continue
                seen.add(kind)
            yield worker

    def _new_pairs(self, coordinate: int, worker: int) -> int:
        """The price of the pairs that a further coordinate closes: with the one before, and at the end of a ring."""
        position = coordinate % self._length
        price = self._task.pair(self._owners[-1], worker) if position else 0
        if position == self._length - 1 and self._length > 1:
            price += self._task.pair(self._owners[coordinate - position], worker)
        return price
