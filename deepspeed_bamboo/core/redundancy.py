"""The pass that adds redundant forwards (and backwards) to the compute orders of a job.

A pass of the shadow of ``c`` runs on the worker that holds it, after what it needs: FRC after the same
micro-batch's FNC of the previous stage, BRC after its FRC and the next stage's BNC. Bamboo's observation
(NSDI'23, section 5) is that a pipeline's bubbles are long enough for many of them. So they go into the slots in
which their worker would wait; when the bubbles are too short for all, the oldest ones run right after the pass
that they depend on, overlapping with what follows, so that the later ones still find the bubbles at the end.

In modes in which redundant passes are optional, only those run that find a bubble, and none after their worker's last
pass: they would hold up what ends the iteration, and protect only what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Op, row
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.core.timeline import Costs, Order, Timed


@dataclass(frozen=True)
class Fit:
    """How many redundant passes a worker runs, and how many of them fit into its bubbles."""

    worker: WorkerId
    forwards: int = 0
    forwards_in_bubbles: int = 0
    backwards: int = 0
    backwards_in_bubbles: int = 0


class _Wish(NamedTuple):
    """A pass to place: not before ``ready``, and at ``overlap`` when no bubble is left for it."""

    overlap: int
    coordinate: Coordinate
    micro_batch: int
    ready: int


class _Placed(NamedTuple):
    wish: _Wish
    start: int
    in_bubble: bool


_Gap = tuple[int, int]  # from, up to


def _counts(placed: Sequence[_Placed]) -> tuple[int, int]:
    """How many there are, and how many of them are in a bubble."""
    return len(placed), sum(p.in_bubble for p in placed)


def add_redundant_passes(
    order: Order,
    *,
    placement: Placement,
    coordinates: Iterable[Coordinate],
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
    costs: Costs,
) -> tuple[Order, tuple[Fit, ...]]:
    """``order`` with what ``mode`` runs for the shadows of ``coordinates``, and how much of it fits, per worker.

    ``order`` has every worker that holds a shadow; second shadows compute nothing. ``progress`` and ``redundant`` say
    what is done already.
    The passes in ``order`` keep their order and times: what a redundant pass that fits no bubble costs is
    for the caller to find by running the programs.
    """
    if not mode.redundant_ops:
        return order, tuple(Fit(worker) for worker in order)
    stages = placement.grid.stages
    covered = frozenset(c for c in coordinates if mode.redundant_ops_of(c.stage, stages=stages))
    job = _Finished(order, placement, progress)
    result, fits = {}, []
    for worker, passes in order.items():
        shadowed = [c for c in placement.next_in_line(worker) if c in covered]
        optional = mode.redundant_passes_are_optional
        gaps = _gaps(passes, end=passes[-1].end if optional and passes else job.end_for(worker))
        wishes = [
            w for c in shadowed for w in job.forward_wishes(c, worker, range(redundant[c].forwards, micro_batches))
        ]
        forwards, gaps = _place(wishes, gaps, cost=costs.forward, only_bubbles=optional)
        backwards: Sequence[_Placed] = ()
        if Op.BRC in mode.redundant_ops:
            done = {(p.wish.coordinate, p.wish.micro_batch): p.start + costs.forward for p in forwards}
            wishes = [
                w for c in shadowed for w in job.backward_wishes(c, range(redundant[c].backwards, micro_batches), done)
            ]
            backwards, _ = _place(wishes, gaps, cost=costs.backward)
        every = [
            *_timed(worker, Op.FRC, forwards, cost=costs.forward, micro_batches=micro_batches),
            *_timed(worker, Op.BRC, backwards, cost=costs.backward, micro_batches=micro_batches),
            *passes,
        ]
        # On equal starts the redundant pass comes first: it fills the wait before the other one.
        result[worker] = tuple(sorted(every, key=attrgetter("start")))
        fits.append(Fit(worker, *_counts(forwards), *_counts(backwards)))
    return result, tuple(fits)


def _timed(worker: WorkerId, op: Op, placed: Iterable[_Placed], *, cost: int, micro_batches: int) -> list[Timed]:
    return [
        Timed(worker, row(op, wish.coordinate, micro_batches)[wish.micro_batch], start, start + cost)
        for wish, start, _ in placed
    ]


class _Finished:
    """When the normal passes end, and what that means for the redundant ones."""

    def __init__(self, order: Order, placement: Placement, progress: Mapping[Coordinate, CoordinateProgress]) -> None:
        self.grid = placement.grid
        self.owners = dict(placement.owners)
        self.progress = progress
        self.order = order
        self.ends: dict[tuple[Op, Coordinate, int], int] = {}
        self.pipeline_ends = [0] * self.grid.pipelines
        for passes in order.values():
            for _, (op, c, m, _), _, end in passes:
                assert c is not None and m is not None
                self.ends[op, c, m] = end
                if end > self.pipeline_ends[c.pipeline]:
                    self.pipeline_ends[c.pipeline] = end

    def end_for(self, worker: WorkerId) -> int:
        """The end of the pipelines that ``worker`` computes for: until then it waits before the tail."""
        own = {t.instruction.coordinate.pipeline for t in self.order[worker] if t.instruction.coordinate is not None}
        return max((self.pipeline_ends[d] for d in own), default=max(self.pipeline_ends))

    def forward_wishes(self, coordinate: Coordinate, worker: WorkerId, micro_batches: range) -> list[_Wish]:
        """FRC: ready with the previous stage's output; without one at once, but then paced by that stage's worker."""
        pace = self.grid.predecessor(coordinate)
        if coordinate.stage > 0:
            return [_Wish(end, coordinate, m, end) for m in micro_batches for end in (self._end(Op.FNC, pace, m),)]
        if self.owners[pace] != worker:
            return [_Wish(0, coordinate, m, 0) for m in micro_batches]
        return [_Wish(self._end(Op.FNC, pace, m), coordinate, m, 0) for m in micro_batches]

    def backward_wishes(
        self, coordinate: Coordinate, micro_batches: range, forwards: Mapping[tuple[Coordinate, int], int]
    ) -> list[_Wish]:
        """BRC: ready with its FRC and the next stage's gradient."""
        behind = Coordinate(coordinate.pipeline, coordinate.stage + 1)
        wishes = []
        for m in micro_batches:
            ready = forwards.get((coordinate, m), 0)
            if behind.stage < self.grid.stages:
                ready = max(ready, self._end(Op.BNC, behind, m))
            wishes.append(_Wish(ready, coordinate, m, ready))
        return wishes

    def _end(self, op: Op, coordinate: Coordinate, micro_batch: int) -> int:
        """When the pass ends; 0 if it was done before."""
        return self.ends.get((op, coordinate, micro_batch), 0)


def _gaps(passes: Iterable[Timed], *, end: int) -> list[_Gap]:
    """Where a worker waits: before, between and after its passes."""
    gaps, free_from = [], 0
    for timed in passes:
        if timed.start > free_from:
            gaps.append((free_from, timed.start))
        free_from = timed.end
    if end > free_from:
        gaps.append((free_from, end))
    return gaps


def _place(
    wishes: Iterable[_Wish], gaps: Sequence[_Gap], *, cost: int, only_bubbles: bool = False
) -> tuple[list[_Placed], list[_Gap]]:
    """Place every wish, starts never decreasing in the order of ``overlap``; and what is left of the gaps.

    With ``only_bubbles`` the oldest ones that find a bubble, and none beyond.

    Filling every bubble with the oldest ready pass would postpone the old ones to the end and leave the
    last ones outside. So before a bubble is filled, as many of the oldest as will be left over anyway, and
    that this bubble can spare, give up and overlap.
    """
    pending = sorted(wishes)
    placed: list[_Placed] = []
    left: list[_Gap] = []
    room = sum((end - start) // cost for start, end in gaps)
    head, earliest = 0, 0

    def put(start: int, in_bubble: bool) -> None:
        nonlocal head, earliest
        earliest = max(start, earliest)
        placed.append(_Placed(pending[head], earliest, in_bubble))
        head += 1

    for start, end in gaps:
        slots = (end - start) // cost
        spare = sum(wish.ready <= start for wish in pending[head:]) - slots
        while spare > 0 and not only_bubbles and len(pending) - head > room and pending[head].overlap <= start:
            put(pending[head].overlap, False)
            spare -= 1
        room -= slots
        now = start
        while head < len(pending) and max(now, pending[head].ready) + cost <= end:
            begin = max(now, pending[head].ready)
            if begin > now:
                left.append((now, begin))
            put(begin, True)
            now = begin + cost
        if now < end:
            left.append((now, end))
    while head < len(pending) and not only_bubbles:
        put(pending[head].overlap, False)
    return placed, left
