"""The order in which every worker computes what it hosts: list scheduling of the whole job over one clock.

Consecutive stages of one pipeline on one worker are a block, which runs as one stage: each of its passes is the
passes of its stages one after the other. So a pipeline of any number of stages on three workers has the bubbles, and
the activations in flight, of a pipeline of three stages.

Each block runs what is left of its 1F1B order. A worker with several blocks takes, whenever it is free, the ready
pass with the lowest 1F1B slot. The result is one feasible global execution, so programs that follow it can't
deadlock; it keeps at most B - b activations of a stage in block b of B alive, as 1F1B does.

It always ends: slots grow along every dependency (FNC b -> FNC b+1 -> ... -> BNC b+1 -> BNC b), what an
interruption already did only removes passes, so among the unfinished passes the lowest slot is ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Op, row
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode, backward_slot, forward_slot, inference_order, stage_order
from deepspeed_bamboo.core.timeline import Costs, Order, Timed

# A forward or backward that is left to do: its block's 1F1B slot, whether it is a forward, its micro-batch and place.
# Compares by priority: lowest slot first, a backward before a forward. Plain tuples, as there are very many.
_Pass = tuple[int, bool, int, int]


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
    owners = dict(placement.owners)
    job = _Job(
        coordinates,
        owners=[owners[c] for c in coordinates],
        blocks=_blocks(coordinates, owners, progress=progress, micro_batches=micro_batches, mode=mode),
        micro_batches=micro_batches,
        progress=[progress[c] for c in coordinates],
        last_stage=placement.grid.stages - 1,
    )
    return job.run(forward=costs.forward, backward=costs.backward)


def _blocks(
    coordinates: Sequence[Coordinate],
    owners: Mapping[Coordinate, WorkerId],
    *,
    progress: Mapping[Coordinate, CoordinateProgress],
    micro_batches: int,
    mode: Mode,
) -> list[tuple[int, tuple[_Pass, ...]]]:
    """Of every block its first place, and the passes that are left to it in their order."""
    runs = [
        [*run]
        for _, run in groupby(range(len(coordinates)), key=lambda i: (coordinates[i].pipeline, owners[coordinates[i]]))
    ]
    of_pipeline: dict[int, list[list[int]]] = {}
    for run in runs:
        of_pipeline.setdefault(coordinates[run[0]].pipeline, []).append(run)
    result: list[tuple[int, tuple[_Pass, ...]]] = []
    for its_runs in of_pipeline.values():
        for number, run in enumerate(its_runs):
            template = _template(blocks=len(its_runs), micro_batches=micro_batches, block=number, mode=mode)
            done = [(progress[coordinates[i]].backwards, progress[coordinates[i]].forwards) for i in run]
            result.append((run[0], _left(template, first=run[0], done=done)))
    return result


@lru_cache(maxsize=1024)
def _template(*, blocks: int, micro_batches: int, block: int, mode: Mode) -> tuple[tuple[int, bool, int], ...]:
    """All passes of one block, in order: slot, whether it is a forward, micro-batch."""
    order = stage_order if mode.trains else inference_order
    return tuple(
        (forward_slot(stage=block, micro_batch=m), True, m)
        if op is Op.FNC
        else (backward_slot(stages=blocks, stage=block, micro_batch=m), False, m)
        for op, m in order(stages=blocks, micro_batches=micro_batches, stage=block)
    )


def _left(
    template: Sequence[tuple[int, bool, int]], *, first: int, done: Sequence[tuple[int, int]]
) -> tuple[_Pass, ...]:
    """The passes of a block stage by stage, without those done. ``done`` of each stage: backwards and forwards."""
    ahead = [(first + i, counts) for i, counts in enumerate(done)]
    back = ahead[::-1]
    return tuple(
        (slot, is_forward, m, place)
        for slot, is_forward, m in template
        for place, counts in (ahead if is_forward else back)
        if m >= counts[is_forward]
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
        blocks: Sequence[tuple[int, Sequence[_Pass]]],
        micro_batches: int,
        progress: Sequence[CoordinateProgress],
        last_stage: int,
    ) -> None:
        self.workers = tuple(dict.fromkeys(owners))
        rank = {worker: i for i, worker in enumerate(self.workers)}
        self.owners = [rank[worker] for worker in owners]
        self.hosted: list[list[int]] = [[] for _ in self.workers]
        for number, (place, _) in enumerate(blocks):
            self.hosted[self.owners[place]].append(number)
        self.first = [c.stage == 0 for c in coordinates]
        self.last = [c.stage == last_stage for c in coordinates]
        self.left = [passes for _, passes in blocks]
        # Of each place its backwards and its forwards: indexed by "is forward".
        self.passes = [(row(Op.BNC, c, micro_batches), row(Op.FNC, c, micro_batches)) for c in coordinates]
        self.count = [len(passes) for passes in self.left]
        self.next = [0] * len(blocks)
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
                block = None if busy[worker] else self._choose(worker)
                if block is not None:
                    busy[worker] = True
                    _, is_forward, m, place = self.left[block][self.next[block]]
                    self.next[block] += 1
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
        """The block whose next pass is the ready one with the lowest slot, or None."""
        best: int | None = None
        lowest: _Pass | None = None
        for block in self.hosted[worker]:
            index = self.next[block]
            if index == self.count[block]:
                continue
            item = self.left[block][index]
            if lowest is not None and lowest <= item:
                continue
            _, is_forward, m, i = item
            if is_forward:
                ready = self.first[i] or m < self.activations[i] or m < self.forwards[i - 1]
            else:
                ready = self.last[i] or m < self.gradients[i] or m < self.backwards[i + 1]
            if ready:
                best, lowest = block, item
        return best

    def _finish(self, place: int, is_forward: bool) -> int | None:
        """Count a pass as done; returns the neighbour's worker, for which something may have become ready."""
        if is_forward:
            self.forwards[place] += 1
            return None if self.last[place] else self.owners[place + 1]
        self.backwards[place] += 1
        return None if self.first[place] else self.owners[place - 1]
