"""Which part of the logical grid each worker of a job hosts at its start, however many workers there are.

The grid is the user's, the workers are whatever there is. With as many workers as coordinates each has one, in the
order that DeepSpeed gives to ranks; with more the last ones stand by; with fewer each has a run of neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate, Grid


def logical_grid(*, stages: int, workers: int, pipelines: int | None = None) -> Grid:
    """The grid of a job of ``stages`` stages that starts with ``workers`` workers.

    Without ``pipelines`` there are as many as the workers fill, and at least one.
    Raises ValueError for less than one stage, pipeline or worker.
    """
    if workers < 1:
        raise ValueError(f"a job needs at least 1 worker, got {workers}")
    return Grid(max(1, workers // max(1, stages)) if pipelines is None else pipelines, stages)


def seats(grid: Grid, workers: int) -> tuple[tuple[Coordinate, ...], ...]:
    """For each of ``workers`` workers the coordinates that it hosts at the start, in grid order.

    Runs of the grid's order that differ by one in length, longer ones first, so that 8 stages on 3 workers are
    3, 3 and 2. A worker that stands by has none. Raises ValueError for less than one worker.
    """
    if workers < 1:
        raise ValueError(f"a job needs at least 1 worker, got {workers}")
    if workers >= len(grid):
        single = tuple((grid.coordinate(rank),) for rank in range(len(grid)))
        return single + ((),) * (workers - len(grid))
    order, (share, longer) = tuple(grid), divmod(len(grid), workers)
    starts = [index * share + min(index, longer) for index in range(workers + 1)]
    return tuple(order[first:last] for first, last in itertools.pairwise(starts))


@dataclass(frozen=True)
class Seat:
    """One worker's place at the start: it is number ``index`` of ``workers`` workers."""

    grid: Grid
    index: int
    workers: int

    @property
    def hosted(self) -> tuple[Coordinate, ...]:
        """The coordinates that this worker hosts; none where it stands by."""
        return seats(self.grid, self.workers)[self.index]

    @property
    def primary(self) -> Coordinate:
        """The coordinate that stock DeepSpeed builds here: the first one hosted, or any where this worker stands by."""
        return self.hosted[0] if self.hosted else self.grid.coordinate(self.index % len(self.grid))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of which this worker builds the layers, in order."""
        return tuple(sorted({coordinate.stage for coordinate in self.hosted} or {self.primary.stage}))

    def owners(self) -> dict[Coordinate, int]:
        """The number of the worker that hosts it, for every coordinate."""
        return {c: index for index, seat in enumerate(seats(self.grid, self.workers)) for c in seat}
