"""The order in which every worker computes what it hosts: list scheduling of the whole job over one clock.

Each coordinate runs what is left of its 1F1B order. A worker with several coordinates takes, whenever it
is free, the ready pass with the lowest 1F1B slot. The result is one feasible global execution, so programs
that follow it can't deadlock; it keeps at most P - p activations of a coordinate of stage p alive, as 1F1B does.

It always ends: slots grow along every dependency (FNC p -> FNC p+1 -> ... -> BNC p+1 -> BNC p), what an
interruption already did only removes passes, so among the unfinished passes the lowest slot is ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode, backward_slot, forward_slot, inference_order, stage_order
from deepspeed_bamboo.core.timeline import Costs, Order, Timed


class _Pass(NamedTuple):
    """A forward or backward that is left to do. Compares by priority: slot, backward first, coordinate."""

    slot: int
    is_forward: bool
    place: int  # index of the coordinate in the list of all that are planned
    micro_batch: int


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
        left=[_left(i, progress[c], template=templates[c.stage]) for i, c in enumerate(coordinates)],
        progress=[progress[c] for c in coordinates],
        last_stage=stages - 1,
    )
    return job.run(forward=costs.forward, backward=costs.backward)


def _template(*, stages: int, micro_batches: int, stage: int, mode: Mode) -> tuple[tuple[int, bool, int], ...]:
    """(slot, is forward, micro-batch) of one stage, in order."""
    order = stage_order if mode.trains else inference_order
    return tuple(
        (forward_slot(stage=stage, micro_batch=m), True, m)
        if op is Op.FNC
        else (backward_slot(stages=stages, stage=stage, micro_batch=m), False, m)
        for op, m in order(stages=stages, micro_batches=micro_batches, stage=stage)
    )


def _left(place: int, counts: CoordinateProgress, *, template: Iterable[tuple[int, bool, int]]) -> tuple[_Pass, ...]:
    return tuple(
        _Pass(slot, is_forward, place, m)
        for slot, is_forward, m in template
        if m >= (counts.forwards if is_forward else counts.backwards)
    )


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
        progress: Sequence[CoordinateProgress],
        last_stage: int,
    ) -> None:
        self.coordinates = coordinates
        self.workers = tuple(dict.fromkeys(owners))
        rank = {worker: i for i, worker in enumerate(self.workers)}
        self.owners = [rank[worker] for worker in owners]
        self.hosted: list[list[int]] = [[] for _ in self.workers]
        for i, owner in enumerate(self.owners):
            self.hosted[owner].append(i)
        self.first = [c.stage == 0 for c in coordinates]
        self.last = [c.stage == last_stage for c in coordinates]
        self.left = left
        self.next = [0] * len(coordinates)
        self.forwards = [p.forwards for p in progress]
        self.backwards = [p.backwards for p in progress]
        self.activations = [p.activations_received for p in progress]
        self.gradients = [p.gradients_received for p in progress]

    def run(self, *, forward: int, backward: int) -> Order:
        """Advance the clock from one completion to the next until nothing is left."""
        order: list[list[Timed]] = [[] for _ in self.workers]
        running: list[tuple[int, int, _Pass]] = []
        busy = [False] * len(self.workers)
        now, awake = 0, set(range(len(self.workers)))
        while awake or running:
            # Everything that ends now is seen before anything starts, so that the result is the same every time.
            for worker in sorted(awake):
                chosen = None if busy[worker] else self._choose(worker)
                if chosen is not None:
                    busy[worker] = True
                    end = now + (forward if chosen.is_forward else backward)
                    heapq.heappush(running, (end, worker, chosen))
                    op = Op.FNC if chosen.is_forward else Op.BNC
                    instruction = Instruction(op, self.coordinates[chosen.place], chosen.micro_batch)
                    order[worker].append(Timed(self.workers[worker], instruction, now, end))
            awake.clear()
            if running:
                now = running[0][0]
            while running and running[0][0] == now:
                _, worker, done = heapq.heappop(running)
                busy[worker] = False
                awake.add(worker)
                affected = self._finish(done)
                if affected is not None:
                    awake.add(affected)
        return dict(zip(self.workers, map(tuple, order), strict=True))

    def _choose(self, worker: int) -> _Pass | None:
        """Take the ready pass with the lowest slot, or None."""
        best: _Pass | None = None
        for place in self.hosted[worker]:
            left, index = self.left[place], self.next[place]
            if index < len(left) and (best is None or left[index] < best) and self._ready(left[index]):
                best = left[index]
        if best is not None:
            self.next[best.place] += 1
        return best

    def _ready(self, item: _Pass) -> bool:
        _, is_forward, i, m = item
        if is_forward:
            return self.first[i] or m < self.activations[i] or m < self.forwards[i - 1]
        return self.last[i] or m < self.gradients[i] or m < self.backwards[i + 1]

    def _finish(self, done: _Pass) -> int | None:
        """Count a pass as done; returns the neighbour's worker, for which something may have become ready."""
        i = done.place
        if done.is_forward:
            self.forwards[i] += 1
            return None if self.last[i] else self.owners[i + 1]
        self.backwards[i] += 1
        return None if self.first[i] else self.owners[i - 1]
