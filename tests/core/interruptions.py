"""Interrupted iterations for property tests: draw a job and where it is hit, then run it to the end.

Each worker stops at its own point, as far as what it receives lets it come: every consistent cut is the
result of some stops. What is in flight is lost, then workers are, then the rest is planned and run; it may be
hit again in the middle of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.interpret import Execution, interpret
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.shadowing import choose_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.planning import plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_after_loss
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.core.verify import verify
from tests.core.cuts import Cut, Cuts

# Of every forward and backward the micro-batches done, in that order.
History = dict[Op, dict[Coordinate, list[int]]]

_END = (1 << 16) - 1  # stops are shares of a program in 1/65536: this one is its end


@dataclass(frozen=True)
class Hit:
    """One interruption: after which share of its program each worker stops, and who is lost (indices, modulo)."""

    stops: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    placement: Placement
    micro_batches: int
    mode: str
    hits: tuple[Hit, ...]


@cache
def initial(pipelines: int, stages: int, copies: int = 1) -> Placement:
    grid = Grid(pipelines, stages)
    return Placement.initial(grid, [f"w{i}" for i in range(len(grid))], copies=copies)


@cache
def fresh_plan(placement: Placement, micro_batches: int, mode: str) -> Plan:
    plan = plan_iteration(placement, micro_batches=micro_batches, mode=mode)
    verify(plan)
    return plan


@cache
def fresh_cuts(placement: Placement, micro_batches: int, mode: str) -> Cuts:
    return Cuts(fresh_plan(placement, micro_batches, mode))


def hits(workers: int) -> st.SearchStrategy[Hit]:
    return st.binary(min_size=4 + 2 * workers, max_size=4 + 2 * workers).map(_hit)


def _hit(data: bytes) -> Hit:
    """A kind of cut, one or two workers to lose, and a point for everyone."""
    kind, count, first, second = data[:4]
    points = [data[i] | data[i + 1] << 8 for i in range(4, len(data), 2)]
    lost = (first,) if count % 2 == 0 else (first, second)
    if kind % 3 == 0:  # everyone anywhere: mostly early, since who stops first holds up the others
        return Hit(tuple(points), lost)
    if kind % 3 == 1:  # everyone about equally far
        return Hit(tuple(min(max(points[0] + (point - _END // 2) // 16, 0), _END) for point in points), lost)
    stopped = {index % len(points) for index in lost}  # the lost ones only: the others as far as that lets them
    return Hit(tuple(point if i in stopped else _END for i, point in enumerate(points)), lost)


def cases(
    *, pipelines: int, stages: tuple[int, int], micro_batches: int, modes: tuple[str, ...], losses: int, copies: int = 1
) -> st.SearchStrategy[Case]:
    """A job on its first placement that is hit once, or up to ``losses`` times."""
    # One draw of bytes a case: with one draw a number, drawing would take longer than running the case.
    hit_size = 4 + 2 * pipelines * stages[1]
    size = 5 + losses * hit_size

    def case(data: bytes) -> Case:
        placement = initial(1 + data[0] % pipelines, stages[0] + data[1] % (stages[1] - stages[0] + 1), copies)
        drawn = 1 + data[4] % losses
        used = 4 + 2 * len(placement.grid)
        return Case(
            placement,
            1 + data[2] % micro_batches,
            modes[data[3] % len(modes)],
            tuple(_hit(data[start : start + used]) for start in range(5, 5 + drawn * hit_size, hit_size)),
        )

    return st.binary(min_size=size, max_size=size).map(case)


@st.composite
def scattered_cases(draw: st.DrawFn, *, modes: tuple[str, ...], copies: int = 1) -> Case:
    """A job whose coordinates and shadows lie anywhere, as after failovers, reconfigurations and rebuilt shadows."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    names = [f"w{i}" for i in range(draw(st.integers(2, 6)))]
    owners = {c: draw(st.sampled_from(names)) for c in grid}
    shadows = {c: draw(st.sampled_from(names)) for c in grid}
    shadows = {c: w for c, w in shadows.items() if w != owners[c]}
    seconds = {c: draw(st.sampled_from(names)) for c in shadows} if copies > 1 else {}
    seconds = {c: w for c, w in seconds.items() if w not in (owners[c], shadows[c])}
    placement = Placement.of(grid, owners=owners, shadows=shadows, second_shadows=seconds, copies=copies)
    return Case(
        placement,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(modes)),
        tuple(draw(hits(len(names))) for _ in range(draw(st.integers(1, 3)))),
    )


@st.composite
def block_cases(draw: st.DrawFn, *, modes: tuple[str, ...]) -> Case:
    """A job of blocks, as at its start on fewer workers than coordinates, or as balanced with one at half speed."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(2, 8)))
    count, micro_batches = draw(st.integers(2, max(2, min(6, len(grid) - 1)))), draw(st.integers(1, 8))
    return Case(
        blocks(grid, count, balanced=draw(st.booleans()), micro_batches=micro_batches),
        micro_batches,
        draw(st.sampled_from(modes)),
        tuple(draw(hits(count)) for _ in range(draw(st.integers(1, 3)))),
    )


@cache
def blocks(grid: Grid, workers: int, *, balanced: bool, micro_batches: int) -> Placement:
    sites = [WorkerSite(f"w{i}", f"n{i}") for i in range(workers)]
    if balanced:
        slow = replace(Profile.even(grid.stages), speeds={"w1": 0.5})
        return balance(grid, sites, profile=slow, micro_batches=micro_batches).placement
    owners = {c: f"w{index}" for c, index in Seat(grid, 0, workers).owners().items()}
    return Placement.of(grid, owners=owners, shadows=choose_shadows(grid, owners, Sites.of(sites), held={}))


def run_to_the_end(case: Case) -> Execution:
    """Run ``case``; asserts on the way what must hold, whatever the hits."""
    placement = case.placement
    plan = fresh_plan(placement, case.micro_batches, case.mode)
    progress: Mapping[Coordinate, CoordinateProgress] = dict.fromkeys(placement.grid, CoordinateProgress())
    redundant: Mapping[Coordinate, CoordinateProgress] = {}
    history: History = {op: {c: [] for c in placement.grid} for op in (Op.FNC, Op.BNC)}
    for number, hit in enumerate(case.hits):
        cut: Cut | Execution
        if number == 0:
            cut = fresh_cuts(placement, case.micro_batches, case.mode).at(stops_of(plan, hit))
            for c, counts in cut.progress.items():
                history[Op.FNC][c], history[Op.BNC][c] = list(range(counts.forwards)), list(range(counts.backwards))
        else:
            cut = interpret(plan, progress=progress, redundant=redundant, stops=stops_of(plan, hit))
            _record(cut, history)
        after = _without_some(placement, [worker for worker, _ in plan.programs], hit)
        stored = {c: (p.forwards, p.backwards) for c, p in cut.redundant.items()}
        next_owner = dict(placement.shadows)
        progress, redundant = progress_after_loss(placement, after, progress=cut.progress, stored=cut.redundant)
        for c in placement.grid:
            if after.owner(c) != placement.owner(c):
                kept = stored[c] if after.owner(c) == next_owner[c] else (0, 0)
                assert kept == (progress[c].forwards, progress[c].backwards)
                history[Op.FNC][c], history[Op.BNC][c] = list(range(kept[0])), list(range(kept[1]))
            else:
                assert progress[c] == cut.progress[c]
        plan = plan_iteration(
            after, micro_batches=case.micro_batches, progress=progress, redundant=redundant, mode=case.mode
        )
        placement = after
    end = verify(plan, progress, redundant=redundant)
    _record(end, history)
    every = list(range(case.micro_batches))
    for op, by_coordinate in history.items():
        for coordinate, done in by_coordinate.items():
            assert done == every, f"{op.value} of {coordinate}: {done}"
    return end


def stops_of(plan: Plan, hit: Hit) -> dict[WorkerId, int]:
    """After how many instructions each worker stops."""
    points = zip(plan.programs, hit.stops, strict=False)  # after a loss there are fewer programs than points
    return {worker: stop * (len(program) + 1) >> 16 for (worker, program), stop in points}


def _without_some(placement: Placement, workers: Sequence[WorkerId], hit: Hit) -> Placement:
    """Lose the workers that ``hit`` names, leaving out those whose loss nobody alive could make good."""
    gone: list[WorkerId] = []
    after = placement
    for index in hit.lost:
        worker = workers[index % len(workers)]
        remaining, _ = placement.without([*gone, worker])
        if remaining is not None:
            gone.append(worker)
            after = remaining
    return after


def _record(execution: Execution, history: History) -> None:
    for _, (op, coordinate, micro_batch, _), _, _ in execution.timeline:
        if op is Op.FNC or op is Op.BNC:
            history[op][coordinate].append(micro_batch)
