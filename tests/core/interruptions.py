"""Interrupted iterations for property tests: draw a job and where it is hit, then run it to the end.

Each worker stops at its own point, as far as what it receives lets it come: every consistent cut is the
result of some stops. What is in flight is lost, then workers are, then the rest is planned and run; it may be
hit again in the middle of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.interpret import Execution, interpret
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import plan_iteration, progress_after_loss, redundant_after_loss
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.verify import verify

_INDEX = st.integers(0, 23)


@dataclass(frozen=True)
class Hit:
    """One interruption: after how many instructions (modulo the program's length) each worker stops, who is lost."""

    stops: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    placement: Placement
    micro_batches: int
    mode: str
    hits: tuple[Hit, ...]


@cache
def initial(pipelines: int, stages: int) -> Placement:
    grid = Grid(pipelines, stages)
    return Placement.initial(grid, [f"w{i}" for i in range(len(grid))])


@cache
def fresh_plan(placement: Placement, micro_batches: int, mode: str) -> Plan:
    plan = plan_iteration(placement, micro_batches=micro_batches, mode=mode)
    verify(plan)
    return plan


def hits(workers: int) -> st.SearchStrategy[Hit]:
    # Two bytes for each stop: one draw, where a list of integers would cost more than the case itself.
    return st.builds(
        lambda points, lost: Hit(tuple(points[i] | points[i + 1] << 8 for i in range(0, 2 * workers, 2)), lost),
        st.binary(min_size=2 * workers, max_size=2 * workers),
        st.one_of(st.tuples(_INDEX), st.tuples(_INDEX, _INDEX)),
    )


@st.composite
def cases(
    draw: st.DrawFn, *, pipelines: int, stages: tuple[int, int], micro_batches: int, modes: tuple[str, ...], losses: int
) -> Case:
    """A job on its first placement that is hit once, or up to ``losses`` times."""
    placement = initial(draw(st.integers(1, pipelines)), draw(st.integers(*stages)))
    return Case(
        placement,
        draw(st.integers(1, micro_batches)),
        draw(st.sampled_from(modes)),
        tuple(draw(hits(len(placement.grid))) for _ in range(draw(st.integers(1, losses)))),
    )


@st.composite
def scattered_cases(draw: st.DrawFn, *, modes: tuple[str, ...]) -> Case:
    """A job whose coordinates and shadows lie anywhere, as after failovers, reconfigurations and rebuilt shadows."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    names = [f"w{i}" for i in range(draw(st.integers(2, 6)))]
    owners = {c: draw(st.sampled_from(names)) for c in grid}
    shadows = {c: draw(st.sampled_from(names)) for c in grid}
    placement = Placement.of(grid, owners=owners, shadows={c: w for c, w in shadows.items() if w != owners[c]})
    return Case(
        placement,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(modes)),
        tuple(draw(hits(len(names))) for _ in range(draw(st.integers(1, 3)))),
    )


def run_to_the_end(case: Case) -> Execution:
    """Run ``case``; asserts on the way what must hold, whatever the hits."""
    placement = case.placement
    plan = fresh_plan(placement, case.micro_batches, case.mode)
    progress: Mapping[Coordinate, CoordinateProgress] = dict.fromkeys(placement.grid, CoordinateProgress())
    redundant: Mapping[Coordinate, CoordinateProgress] = {}
    history: dict[tuple[Op, Coordinate], list[int]] = {(op, c): [] for op in (Op.FNC, Op.BNC) for c in placement.grid}
    for hit in case.hits:
        cut = interpret(plan, progress=progress, redundant=redundant, stops=_stops(plan, hit))
        _record(cut, history)
        after = _without_some(placement, hit)
        stored = {c: (p.forwards, p.backwards) for c, p in cut.redundant.items()}
        progress = progress_after_loss(
            placement,
            after,
            cut.progress,
            {c: forwards for c, (forwards, _) in stored.items()},
            {c: backwards for c, (_, backwards) in stored.items()},
        )
        redundant = redundant_after_loss(placement, after, cut.redundant)
        for c in placement.grid:
            if after.owner(c) != placement.owner(c):
                assert stored[c] == (progress[c].forwards, progress[c].backwards)
                history[Op.FNC, c], history[Op.BNC, c] = list(range(stored[c][0])), list(range(stored[c][1]))
            else:
                assert progress[c] == cut.progress[c]
        plan = plan_iteration(
            after, micro_batches=case.micro_batches, progress=progress, redundant=redundant, mode=case.mode
        )
        placement = after
    end = verify(plan, progress, redundant=redundant)
    _record(end, history)
    for (op, coordinate), done in history.items():
        assert done == list(range(case.micro_batches)), f"{op.value} of {coordinate}: {done}"
    return end


def _stops(plan: Plan, hit: Hit) -> dict[WorkerId, int]:
    return {
        worker: stop % (len(program) + 1) for (worker, program), stop in zip(plan.programs, hit.stops, strict=False)
    }


def _without_some(placement: Placement, hit: Hit) -> Placement:
    """Lose the workers that ``hit`` names, leaving out those whose loss nobody alive could make good."""
    gone: list[WorkerId] = []
    after = placement
    for index in hit.lost:
        worker = placement.workers[index % len(placement.workers)]
        remaining, _ = placement.without([*gone, worker])
        if remaining is not None:
            gone.append(worker)
            after = remaining
    return after


def _record(execution: Execution, history: dict[tuple[Op, Coordinate], list[int]]) -> None:
    for timed in execution.timeline:
        instruction = timed.instruction
        if instruction.op in (Op.FNC, Op.BNC):
            assert instruction.coordinate is not None and instruction.micro_batch is not None
            history[instruction.op, instruction.coordinate].append(instruction.micro_batch)
