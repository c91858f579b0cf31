"""The order in which every worker computes what it hosts: list scheduling of the whole job over one clock.

Each coordinate runs what is left of its 1F1B order. A worker with several coordinates takes, whenever it
is free, the ready pass with the lowest 1F1B slot. The result is one feasible global execution, so programs
that follow it can't deadlock; it keeps at most P - p activations of a coordinate of stage p alive, as 1F1B does.

It always ends: slots grow along every dependency (FNC p -> FNC p+1 -> ... -> BNC p+1 -> BNC p), what an
interruption already did only removes passes, so among the unfinished passes the lowest slot is ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Op, row
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode, backward_slot, forward_slot, inference_order, stage_order
from deepspeed_bamboo.core.timeline import Costs, Order, Timed

# A forward or backward that is left to do: its 1F1B slot, whether it is a forward, and its micro-batch.
# Compares by priority: lowest slot first, a backward before a forward. Plain tuples, as there are very many.
_Pass = tuple[int, bool, int]


def order_passes(
    placement: Placement,
    *,
    coordinates: Sequence[Coordinate],
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
    costs: Costs,
) -> Order:
    """FNC and BNC of every worker that owns one of ``coordinates``, with simulated times.

    ``coordinates`` are whole pipelines, stages in order; ``progress`` has each of them.
    """
    stages = placement.grid.stages
    templates = tuple(
        _template(stages=stages, micro_batches=micro_batches, stage=stage, mode=mode) for stage in range(stages)
    )
    owners = dict(placement.owners)
    job = _Job(
        coordinates,
        owners=[owners[c] for c in coordinates],
        left=[_left(progress[c], template=templates[c.stage]) for c in coordinates],
        micro_batches=micro_batches,
        progress=[progress[c] for c in coordinates],
        last_stage=stages - 1,
    )
    return job.run(forward=costs.forward, backward=costs.backward)


@lru_cache(maxsize=1024)
def _template(*, stages: int, micro_batches: int, stage: int, mode: Mode) -> tuple[_Pass, ...]:
    """All passes of one stage, in order."""
    order = stage_order if mode.trains else inference_order
    return tuple(
        (forward_slot(stage=stage, micro_batch=m), True, m)
        if op is Op.FNC
        else (backward_slot(stages=stages, stage=stage, micro_batch=m), False, m)
        for op, m in order(stages=stages, micro_batches=micro_batches, stage=stage)
    )


def _left(counts: CoordinateProgress, *, template: tuple[_Pass, ...]) -> tuple[_Pass, ...]:
    if counts.forwards == 0 and counts.backwards == 0:
        return template
    done = (counts.backwards, counts.forwards)  # indexed by "is forward"
    return tuple(item for item in template if item[2] >= done[item[1]])


class _Job:
    """The simulated job: the state of one call of :func:`order_passes`, never seen outside of it.

    Lists are indexed by place, so that the neighbour stages of ``i`` are ``i - 1`` and ``i + 1``.
    """

    def __init__(
        self,
        coordinates: Sequence[Coordinate],
        *,
        owners: Sequence[WorkerId],
        left: Sequence[Sequence[_Pass]],
        micro_batches: int,
        progress: Sequence[CoordinateProgress],
        last_stage: int,
    ) -> None:
        self.workers = tuple(dict.fromkeys(owners))
        rank = {worker: i for i, worker in enumerate(self.workers)}
        self.owners = [rank[worker] for worker in owners]
        self.hosted: list[list[int]] = [[] for _ in self.workers]
        for i, owner in enumerate(self.owners):
            self.hosted[owner].append(i)
        self.first = [c.stage == 0 for c in coordinates]
        self.last = [c.stage == last_stage for c in coordinates]
        self.left = left
        # Of each place its backwards and its forwards: indexed by "is forward".
        self.passes = [(row(Op.BNC, c, micro_batches), row(Op.FNC, c, micro_batches)) for c in coordinates]
        self.count = [len(items) for items in left]
        self.next = [0] * len(coordinates)
        self.forwards = [p.forwards for p in progress]
        self.backwards = [p.backwards for p in progress]
        self.activations = [p.activations_received for p in progress]
        self.gradients = [p.gradients_received for p in progress]

    def run(self, *, forward: int, backward: int) -> Order:
        """Advance the clock from one completion to the next until nothing is left."""
        order: list[list[Timed]] = [[] for _ in self.workers]
        running: list[tuple[int, int, int, bool]] = []  # end, worker, place, is forward
        busy = [False] * len(self.workers)
        now, awake = 0, set(range(len(self.workers)))
        while awake or running:
            # Everything that ends now is seen before anything starts, so that the result is the same every time.
            for worker in sorted(awake):
                place = None if busy[worker] else self._choose(worker)
                if place is not None:
                    busy[worker] = True
                    _, is_forward, m = self.left[place][self.next[place]]
                    self.next[place] += 1
                    end = now + (forward if is_forward else backward)
                    heapq.heappush(running, (end, worker, place, is_forward))
                    order[worker].append(Timed(self.workers[worker], self.passes[place][is_forward][m], now, end))
            awake.clear()
            if running:
                now = running[0][0]
            while running and running[0][0] == now:
                _, worker, place, is_forward = heapq.heappop(running)
                busy[worker] = False
                awake.add(worker)
                affected = self._finish(place, is_forward)
                if affected is not None:
                    awake.add(affected)
        return dict(zip(self.workers, map(tuple, order), strict=True))

    def _choose(self, worker: int) -> int | None:
        """The place whose next pass is the ready one with the lowest slot, or None."""
        best: int | None = None
        lowest: _Pass | None = None
        for i in self.hosted[worker]:
            index = self.next[i]
            if index == self.count[i]:
                continue
            item = self.left[i][index]
            if lowest is not None and lowest <= item:
                continue
            _, is_forward, m = item
            if is_forward:
                ready = self.first[i] or m < self.activations[i] or m < self.forwards[i - 1]
            else:
                ready = self.last[i] or m < self.gradients[i] or m < self.backwards[i + 1]
            if ready:
                best, lowest = i, item
        return best

    def _finish(self, place: int, is_forward: bool) -> int | None:
        """Count a pass as done; returns the neighbour's worker, for which something may have become ready."""
        if is_forward:
            self.forwards[place] += 1
            return None if self.last[place] else self.owners[place + 1]
        self.backwards[place] += 1
        return None if self.first[place] else self.owners[place - 1]
