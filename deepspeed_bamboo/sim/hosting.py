"""Who hosts what: coordinates on workers, several on one if need be, kept balanced with few moves.

A coordinate (d, p) is the number d * stages + p. Its shadow is on the worker of its predecessor in the pipeline (for
one stage: of the pipeline before), so neighbours are kept on different workers and, where zones are known, in
different zones, whenever there are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from ..core import grid as core_grid
from ..core.placement import Placement
from .steptimes import Grid

__all__ = ["Hosting"]


class Hosting:
    """A mutable placement of one run; every operation takes about constant time per coordinate that it moves.

    Args:
        grid: D x P, fixed for the run.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.host: list[str | None] = [None] * grid.size
        # The shadow rule is core's. Numbers follow its order of coordinates: pipeline by pipeline.
        self._core_grid = core_grid.Grid(grid.pipelines, grid.stages)
        numbers = {coordinate: number for number, coordinate in enumerate(self._core_grid)}
        self._predecessors = [numbers[self._core_grid.predecessor(coordinate)] for coordinate in numbers]
        self._successors = [0] * grid.size
        for number, predecessor in enumerate(self._predecessors):
            self._successors[predecessor] = number
        self._hosted: dict[str, dict[int, None]] = {}
        self._zone: dict[str, str] = {}
        # Workers by how many coordinates they host; draining ones are in none, so they are given nothing.
        self._by_load: list[dict[str, None]] = [{}]
        self._draining: dict[str, None] = {}

    @property
    def workers(self) -> int:
        """Workers that may host something."""
        return len(self._hosted) - len(self._draining)

    @property
    def drains(self) -> bool:
        """Whether somebody is to be emptied."""
        return bool(self._draining)

    @property
    def most_hosted(self) -> int:
        """Coordinates on the most loaded worker."""
        while len(self._by_load) > 1 and not self._by_load[-1]:
            self._by_load.pop()
        draining = max((len(self._hosted[node]) for node in self._draining), default=0)
        return max(len(self._by_load) - 1, draining)

    @property
    def fair_share(self) -> int:
        """Coordinates on the most loaded worker when they are spread evenly."""
        return -(-self.grid.size // max(1, self.workers))

    def __contains__(self, node: str) -> bool:
        return node in self._hosted

    def hosted(self, node: str) -> tuple[int, ...]:
        """The coordinates of a worker."""
        return tuple(self._hosted[node])

    def predecessor(self, coordinate: int) -> int:
        """The coordinate whose worker holds this one's shadow."""
        return self._predecessors[coordinate]

    def successor(self, coordinate: int) -> int:
        """The coordinate whose shadow this one's worker holds."""
        return self._successors[coordinate]

    def placement(self, *, unprotected: Container[int] = ()) -> Placement:
        """The same as core's immutable value; coordinates beside their predecessor have no shadow there."""
        grid = self._core_grid
        owners = {one: self.host[index] or "" for index, one in enumerate(grid)}
        shadows = {
            one: owners[grid.predecessor(one)]
            for index, one in enumerate(grid)
            if index not in unprotected and owners[grid.predecessor(one)] != owners[one]
        }
        return Placement.of(grid, owners=owners, shadows=shadows)

    def replicas(self, coordinate: int) -> Iterable[int]:
        """The same stage in the other pipelines: the same parameters."""
        stage = coordinate % self.grid.stages
        mine = coordinate // self.grid.stages
        return (d * self.grid.stages + stage for d in range(self.grid.pipelines) if d != mine)

    def join(self, node: str, zone: str) -> None:
        """A worker comes; it hosts nothing yet."""
        self._hosted[node] = {}
        self._zone[node] = zone
        self._by_load[0][node] = None

    def drain(self, node: str) -> None:
        """A worker that will go: `rebalance` moves what it hosts."""
        if node in self._hosted and node not in self._draining:
            del self._by_load[len(self._hosted[node])][node]
            self._draining[node] = None

    def leave(self, node: str) -> tuple[int, ...]:
        """A worker goes; returns the coordinates that are now without one."""
        lost = tuple(self._hosted.pop(node))
        del self._zone[node]
        if node in self._draining:
            del self._draining[node]
        else:
            del self._by_load[len(lost)][node]
        for coordinate in lost:
            self.host[coordinate] = None
        return lost

    def clear(self) -> None:
        """Nobody hosts anything."""
        for coordinate in range(self.grid.size):
            self.put(coordinate, None)

    def put(self, coordinate: int, node: str | None) -> None:
        """Move a coordinate to a worker, or to none."""
        before = self.host[coordinate]
        if before is not None:
            self._change_load(before, lambda hosted: hosted.pop(coordinate))
        self.host[coordinate] = node
        if node is not None:
            self._change_load(node, lambda hosted: hosted.setdefault(coordinate))

    def _change_load(self, node: str, change: Callable[[dict[int, None]], None]) -> None:
        hosted = self._hosted[node]
        if node not in self._draining:
            del self._by_load[len(hosted)][node]
        change(hosted)
        if node not in self._draining:
            while len(self._by_load) <= len(hosted):
                self._by_load.append({})
            self._by_load[len(hosted)][node] = None

    def lightest(self, coordinate: int, *, below: int) -> str | None:
        """The worker to give a coordinate to, hosting fewer than `below`: the least loaded one that hosts none of its
        neighbours, in a zone of none of theirs if there is one. None if every such worker hosts a neighbour."""
        near = {self.host[self.predecessor(coordinate)], self.host[self.successor(coordinate)]}
        zones = {self._zone[node] for node in near if node is not None} - {""}
        fallback: str | None = None
        for nodes in self._by_load[:below]:
            for node in nodes:
                if node in near:
                    continue
                if self._zone[node] not in zones:
                    return node
                if fallback is None:
                    fallback = node
                if not zones:
                    break
        return fallback

    def place_all(self) -> None:
        """Make a new placement: balanced workers, neighbours apart where possible."""
        self.clear()
        for coordinate in range(self.grid.size):
            self._settle(coordinate)
        self.rebalance()

    def _settle(self, coordinate: int) -> None:
        target = self.lightest(coordinate, below=len(self._by_load))
        self.put(coordinate, target if target is not None else self.least_loaded())

    def least_loaded(self) -> str:
        return next(node for nodes in self._by_load for node in nodes)

    def rebalance(self, suspects: Iterable[int] = ()) -> list[int]:
        """Few moves that empty draining workers, take neighbours apart, and bring every load to the fair share.

        Args:
            suspects: coordinates that may be next to a neighbour; only these are looked at for that.

        Returns:
            The coordinates that moved.
        """
        moved: dict[int, None] = {}
        for node in self._draining:
            for coordinate in tuple(self._hosted[node]) if self.workers else ():
                self._settle(coordinate)
                moved[coordinate] = None
        fair = self.fair_share
        for coordinate in suspects:
            if self._beside_neighbour(coordinate) and self._move_away(coordinate, below=fair):
                moved[coordinate] = None
        while self.workers and len(self._by_load) - 1 > fair:
            if not self._by_load[-1]:
                self._by_load.pop()
                continue
            unloaded = self._unload(next(iter(self._by_load[-1])), fair)
            if unloaded is None:
                break
            moved[unloaded] = None
        return list(moved)

    def _beside_neighbour(self, coordinate: int) -> bool:
        mine = self.host[coordinate]
        return mine in (self.host[self.predecessor(coordinate)], self.host[self.successor(coordinate)])

    def _move_away(self, coordinate: int, *, below: int) -> bool:
        target = self.lightest(coordinate, below=below)
        if target is None:
            target = self.lightest(coordinate, below=below + 1)
        if target is None or target == self.host[coordinate]:
            return False
        self.put(coordinate, target)
        return True

    def _unload(self, node: str, fair: int) -> int | None:
        """Move one coordinate off an overloaded worker: one beside a neighbour if there is one."""
        order = sorted(self._hosted[node], key=lambda one: not self._beside_neighbour(one))
        for coordinate in order:
            target = self.lightest(coordinate, below=fair)
            if target is not None and target != node:
                self.put(coordinate, target)
                return coordinate
        # Only workers with neighbours have room: balance comes first, as step time depends on it.
        target = self.least_loaded()
        if len(self._hosted[target]) >= fair:
            return None
        self.put(order[0], target)
        return order[0]
