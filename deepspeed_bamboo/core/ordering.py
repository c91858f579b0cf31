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
    coordinate: Coordinate
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
    """FNC and BNC of every worker that owns one of ``coordinates`` (whole pipelines), with simulated times."""
    stages = placement.grid.stages
    templates = tuple(
        _template(stages=stages, micro_batches=micro_batches, stage=stage, mode=mode) for stage in range(stages)
    )
    job = _Job(
        owners=dict(placement.owners),
        left={c: _left(c, progress[c], template=templates[c.stage]) for c in coordinates},
        progress=progress,
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


def _left(
    coordinate: Coordinate, counts: CoordinateProgress, *, template: Iterable[tuple[int, bool, int]]
) -> tuple[_Pass, ...]:
    return tuple(
        _Pass(slot, is_forward, coordinate, m)
        for slot, is_forward, m in template
        if m >= (counts.forwards if is_forward else counts.backwards)
    )


class _Job:
    """The simulated job: the state of one call of :func:`order_passes`, never seen outside of it."""

    def __init__(
        self,
        *,
        owners: Mapping[Coordinate, WorkerId],
        left: Mapping[Coordinate, Sequence[_Pass]],
        progress: Mapping[Coordinate, CoordinateProgress],
        last_stage: int,
    ) -> None:
        self.owners = owners
        self.left = left
        self.last_stage = last_stage
        self.next = dict.fromkeys(left, 0)
        # How many micro-batches have their input here or on the way: a resend counts from the start.
        self.forwards = {c: progress[c].forwards for c in left}
        self.backwards = {c: progress[c].backwards for c in left}
        self.activations = {c: progress[c].activations_received for c in left}
        self.gradients = {c: progress[c].gradients_received for c in left}
        self.hosted: dict[WorkerId, list[Coordinate]] = {}
        for c in left:
            self.hosted.setdefault(owners[c], []).append(c)
        self.rank = {worker: i for i, worker in enumerate(self.hosted)}

    def run(self, *, forward: int, backward: int) -> Order:
        """Advance the clock from one completion to the next until nothing is left."""
        order: dict[WorkerId, list[Timed]] = {worker: [] for worker in self.hosted}
        running: list[tuple[int, int, _Pass]] = []
        busy: set[WorkerId] = set()
        now, awake = 0, set(self.hosted)
        while awake or running:
            # Everything that ends now is seen before anything starts, so that the result is the same every time.
            for worker in sorted(awake, key=self.rank.__getitem__):
                chosen = None if worker in busy else self._choose(worker)
                if chosen is not None:
                    busy.add(worker)
                    end = now + (forward if chosen.is_forward else backward)
                    heapq.heappush(running, (end, self.rank[worker], chosen))
                    op = Op.FNC if chosen.is_forward else Op.BNC
                    order[worker].append(
                        Timed(worker, Instruction(op, chosen.coordinate, chosen.micro_batch), now, end)
                    )
            awake = set()
            if running:
                now = running[0][0]
            while running and running[0][0] == now:
                done = heapq.heappop(running)[2]
                busy.discard(self.owners[done.coordinate])
                awake.update(self._finish(done))
        return {worker: tuple(timed) for worker, timed in order.items()}

    def _choose(self, worker: WorkerId) -> _Pass | None:
        """Take the ready pass with the lowest slot, or None."""
        best: _Pass | None = None
        for coordinate in self.hosted[worker]:
            left, index = self.left[coordinate], self.next[coordinate]
            if index < len(left) and (best is None or left[index] < best) and self._ready(left[index]):
                best = left[index]
        if best is not None:
            self.next[best.coordinate] += 1
        return best

    def _ready(self, item: _Pass) -> bool:
        c, m = item.coordinate, item.micro_batch
        if item.is_forward:
            return c.stage == 0 or m < self.activations[c] or m < self.forwards[Coordinate(c.pipeline, c.stage - 1)]
        return (
            c.stage == self.last_stage
            or m < self.gradients[c]
            or m < self.backwards[Coordinate(c.pipeline, c.stage + 1)]
        )

    def _finish(self, done: _Pass) -> Iterable[WorkerId]:
        """Count a pass as done; returns the workers for which something may have become ready."""
        c = done.coordinate
        (self.forwards if done.is_forward else self.backwards)[c] += 1
        neighbour = c.stage + (1 if done.is_forward else -1)
        yield self.owners[c]
        if 0 <= neighbour <= self.last_stage:
            yield self.owners[Coordinate(c.pipeline, neighbour)]
