"""FRC and BRC: where they go, how many fit into bubbles, what they save after a loss."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import COMPUTE, TAIL, Instruction, Op
from deepspeed_bamboo.core.interpret import interpret
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import bubble_fit, plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_after_loss
from deepspeed_bamboo.core.redundancy import Fit
from deepspeed_bamboo.core.schedule import Mode, Plan
from deepspeed_bamboo.core.schedule_error import ScheduleError
from deepspeed_bamboo.core.timeline import Costs, Timed, length
from deepspeed_bamboo.core.verify import verify
from tests.core.interruptions import initial


def text(*lines: str) -> tuple[Instruction, ...]:
    return tuple(Instruction.parse(line) for line in lines) + tuple(Instruction(op) for op in TAIL)


def passes(plan: Plan, *ops: Op) -> list[tuple[Op, Coordinate | None, int | None]]:
    return [(i.op, i.coordinate, i.micro_batch) for _, program in plan.programs for i in program if i.op in ops]


@pytest.mark.parametrize("mode", ["off", "lazy"])
def test_only_eager_and_full_run_redundant_passes(mode: str) -> None:
    placement = initial(1, 4)
    plan = plan_iteration(placement, micro_batches=6, mode=mode)
    assert passes(plan, Op.FRC, Op.BRC) == []
    assert plan.programs == plan_iteration(placement, micro_batches=6).programs
    assert len(passes(plan_iteration(placement, micro_batches=6, mode="eager"), Op.FRC)) == 24
    assert len(passes(plan_iteration(placement, micro_batches=6, mode="full"), Op.BRC)) == 24


@pytest.mark.parametrize(("pipelines", "stages"), [(1, 4), (2, 2), (1, 2), (2, 1)])
def test_without_kept_results_the_last_stage_has_no_redundant_forward(pipelines: int, stages: int) -> None:
    plan = plan_iteration(initial(pipelines, stages), micro_batches=6, mode="eager-recompute")
    verify(plan)
    forwards = {coordinate for _, coordinate, _ in passes(plan, Op.FRC, Op.BRC)}
    assert forwards == {Coordinate(d, p) for d in range(pipelines) for p in range(stages - 1)}


@settings(deadline=None, max_examples=100, database=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["eager-bubbles", "eager-recompute"]),
)
def test_optional_redundant_forwards_use_only_bubbles(
    pipelines: int, stages: int, micro_batches: int, backward: int, mode: str
) -> None:
    placement, costs = initial(pipelines, stages), Costs(1, backward)
    plan = plan_iteration(placement, micro_batches=micro_batches, costs=costs, mode=mode)
    lazy = plan_iteration(placement, micro_batches=micro_batches, costs=costs)
    assert length(verify(plan, costs=costs).timeline) == length(verify(lazy, costs=costs).timeline)
    forwards = passes(plan, Op.FRC)
    for c in {coordinate for _, coordinate, _ in forwards}:
        done = [m for _, coordinate, m in forwards if coordinate == c]
        assert done == list(range(len(done))), "a shadow counts its forwards, so they must be the first ones"
    for fit in bubble_fit(placement, micro_batches=micro_batches, costs=costs, mode=mode):
        assert fit.forwards == fit.forwards_in_bubbles
    for _, program in plan.programs:
        ops = [i.op for i in program if i.op in COMPUTE]
        assert not ops or ops[-1] is Op.BNC, "what ends the iteration is not held up"


def test_eager_in_bubbles_leaves_out_what_eager_overlaps() -> None:
    def forwards(mode: str) -> set[tuple[Op, Coordinate | None, int | None]]:
        return set(passes(plan_iteration(initial(1, 4), micro_batches=8, mode=mode), Op.FRC))

    assert len(forwards("eager")) == 4 * 8
    assert forwards("eager-recompute") < forwards("eager-bubbles") < forwards("eager")
    assert {m for _, c, m in forwards("eager-bubbles") if c == Coordinate(0, 1)} == {0, 1, 2, 3, 4, 5, 6}


@settings(deadline=None, max_examples=100, database=None, derandomize=True)
@given(st.integers(2, 5), st.integers(1, 8), st.integers(0, 40), st.integers(0, 4), st.integers(0, 8))
def test_redundant_forwards_left_out_at_run_time_are_done_after_a_loss(
    stages: int, micro_batches: int, until: int, lost: int, left_out: int
) -> None:
    before, mode = initial(1, stages), "eager-bubbles"
    done = interpret(plan_iteration(before, micro_batches=micro_batches, mode=mode), until=until)
    stored = {c: r._replace(forwards=max(0, r.forwards - left_out)) for c, r in done.redundant.items()}
    after, _ = before.without([f"w{lost % stages}"])
    assert after is not None
    progress, redundant = progress_after_loss(before, after, progress=done.progress, stored=stored)
    rest = plan_iteration(after, micro_batches=micro_batches, progress=progress, redundant=redundant, mode=mode)
    verify(rest, progress, redundant=redundant)
    gone = Coordinate(0, lost % stages)
    again = [m for _, c, m in passes(rest, Op.FNC) if c == gone]
    assert again == list(range(stored[gone].forwards, micro_batches))


def test_a_last_stage_without_redundant_forwards_is_repeated_in_full() -> None:
    before, micro_batches, mode = initial(1, 3), 4, "eager-recompute"
    plan = plan_iteration(before, micro_batches=micro_batches, mode=mode)
    done = interpret(plan, until=8)
    assert done.progress[Coordinate(0, 2)].backwards > 0
    after, _ = before.without(["w2"])
    assert after is not None
    progress, redundant = progress_after_loss(before, after, progress=done.progress, stored=done.redundant)
    assert progress[Coordinate(0, 2)] == CoordinateProgress()
    rest = plan_iteration(
        after,
        micro_batches=micro_batches,
        progress=progress,
        redundant=redundant,
        mode=mode,
    )
    again = [(op, m) for op, c, m in passes(rest, Op.FNC, Op.BNC) if c == Coordinate(0, 2)]
    for op in (Op.FNC, Op.BNC):
        assert [m for done_again, m in again if done_again is op] == list(range(micro_batches))


def test_a_redundant_forward_of_the_last_stage_breaks_such_a_plan() -> None:
    eager = plan_iteration(initial(1, 3), micro_batches=2, mode="eager")
    with pytest.raises(ScheduleError, match="no shadow of"):
        verify(dataclasses.replace(eager, mode=Mode.EAGER_RECOMPUTE))


def test_eager_programs_of_two_stages() -> None:
    plan = plan_iteration(initial(1, 2), micro_batches=1, mode="eager")
    first = (
        "LOAD 0.0 0",
        "FNC 0.0 0",
        "SEND_ACTIVATION 0.0 0",
        "LOAD 0.1 0",
        "FRC 0.1 0",
        "RECV_GRAD 0.0 0",
        "BNC 0.0 0",
    )
    last = (
        "LOAD 0.0 0",
        "FRC 0.0 0",
        "LOAD 0.1 0",
        "RECV_ACTIVATION 0.1 0",
        "FNC 0.1 0",
        "BNC 0.1 0",
        "SEND_GRAD 0.1 0",
    )
    assert plan.programs == (("w0", text(*first)), ("w1", text(*last)))


def test_full_sends_the_gradient_of_the_shadowed_output_to_the_shadow() -> None:
    plan = plan_iteration(initial(1, 3), micro_batches=1, mode="full")
    assert Instruction.parse("SEND_GRAD 0.2 0 shadow") in plan.program("w2")
    own = plan.program("w0")
    assert own.index(Instruction.parse("RECV_GRAD 0.1 0 shadow")) < own.index(Instruction.parse("BRC 0.1 0"))
    # The shadow of 0.0 is on w2, that of 0.2 on w1: the last stage needs no gradient, and w1 owns 0.1.
    assert Instruction.parse("SEND_GRAD 0.1 0 shadow") in plan.program("w1")
    assert len([i for _, program in plan.programs for i in program if i.to_shadow]) == 4


def test_shadow_apart_from_the_previous_stage_gets_its_input_sent() -> None:
    grid = Grid(1, 2)
    owners = {Coordinate(0, 0): "a", Coordinate(0, 1): "b"}
    plan = plan_iteration(
        Placement.of(grid, owners=owners, shadows={Coordinate(0, 1): "c"}), micro_batches=1, mode="eager"
    )
    assert plan.program("c") == text("LOAD 0.1 0", "RECV_ACTIVATION 0.1 0 shadow", "FRC 0.1 0")
    sends = [str(i) for i in plan.program("a") if i.op is Op.SEND_ACTIVATION]
    assert sends == ["SEND_ACTIVATION 0.0 0", "SEND_ACTIVATION 0.0 0 shadow"]
    verify(plan)


def test_fit_of_a_known_grid() -> None:
    placement = initial(1, 4)
    lazy = verify(plan_iteration(placement, micro_batches=6))
    eager = verify(plan_iteration(placement, micro_batches=6, mode="eager"))
    assert bubble_fit(placement, micro_batches=6) == tuple(Fit(f"w{i}", 6, 6) for i in range(4))
    assert length(eager.timeline) == length(lazy.timeline) == 27  # 3 slots x (6 + 4 - 1): bubbles only


def test_without_bubbles_nothing_fits() -> None:
    assert bubble_fit(initial(3, 1), micro_batches=5) == tuple(Fit(f"w{i}", 5, 0) for i in range(3))
    one_job = verify(plan_iteration(initial(3, 1), micro_batches=5, mode="eager"))
    assert length(one_job.timeline) == 5 * (1 + 1 + 2)


def free_slots(timeline: Iterable[Timed], worker: str, *, end: int) -> list[int]:
    busy = {t for timed in timeline if timed.worker == worker for t in range(timed.start, timed.end)}
    return [slot for slot in range(end) if slot not in busy]


@settings(deadline=None, max_examples=150, database=None, derandomize=True)
@given(st.integers(2, 8), st.integers(1, 16), st.integers(1, 3))
def test_as_many_fit_as_can(stages: int, micro_batches: int, backward: int) -> None:
    """With forwards of one slot, filling every free slot with any ready FRC is the most that can fit."""
    placement, costs = initial(1, stages), Costs(1, backward)
    lazy = interpret(plan_iteration(placement, micro_batches=micro_batches, costs=costs), costs=costs)
    eager = verify(plan_iteration(placement, micro_batches=micro_batches, costs=costs, mode="eager"), costs=costs)
    fits = {fit.worker: fit for fit in bubble_fit(placement, micro_batches=micro_batches, costs=costs)}
    end = length(lazy.timeline)
    for stage in range(stages):
        worker = f"w{stage}"
        ready = sorted(
            0 if stage == stages - 1 else timed.end
            for timed in lazy.timeline
            if timed.worker == worker and timed.instruction.op is Op.FNC
        )
        most = 0
        for slot in free_slots(lazy.timeline, worker, end=end):
            most += most < micro_batches and ready[most] <= slot
        assert fits[worker].forwards == micro_batches
        assert fits[worker].forwards_in_bubbles == most
    if all(fit.forwards_in_bubbles == micro_batches for fit in fits.values()):
        assert length(eager.timeline) == end
    else:
        assert length(eager.timeline) > end


@settings(deadline=None, max_examples=100, database=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 8), st.sampled_from(["eager", "eager-recompute", "full"]))
def test_normal_passes_keep_their_order(pipelines: int, stages: int, micro_batches: int, mode: str) -> None:
    placement = initial(pipelines, stages)
    with_redundancy = plan_iteration(placement, micro_batches=micro_batches, mode=mode)
    without = plan_iteration(placement, micro_batches=micro_batches)
    assert passes(with_redundancy, Op.FNC, Op.BNC) == passes(without, Op.FNC, Op.BNC)
    shadows = len(placement.shadows)
    forwards = len(passes(with_redundancy, Op.FRC))
    assert forwards == shadows * micro_batches or (mode == "eager-recompute" and forwards < shadows * micro_batches)
    assert len(passes(with_redundancy, Op.BRC)) == (shadows * micro_batches if mode == "full" else 0)


def recomputed(mode: str, *, slot: int, lost: str) -> tuple[int, int, int]:
    """FNC and BNC of the lost coordinate that the recovery runs, and the slots that it takes."""
    before = initial(1, 4)
    cut = interpret(plan_iteration(before, micro_batches=8, mode=mode), until=slot)
    after, _ = before.without([lost])
    assert after is not None
    progress, redundant = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
    plan = plan_iteration(after, micro_batches=8, progress=progress, redundant=redundant, mode=mode)
    end = verify(plan, progress, redundant=redundant)
    coordinate = before.hosted_by(lost)[0]
    runs = [t.instruction.op for t in end.timeline if t.instruction.coordinate == coordinate]
    return runs.count(Op.FNC), runs.count(Op.BNC), length(t for t in end.timeline if t.instruction.op in COMPUTE)


@pytest.mark.parametrize("lost", ["w0", "w1", "w2", "w3"])
@pytest.mark.parametrize("slot", [16, 20, 24, 28, 32])
def test_stored_results_are_not_recomputed(lost: str, slot: int) -> None:
    lazy, eager, full = (recomputed(mode, slot=slot, lost=lost) for mode in ("lazy", "eager", "full"))
    assert lazy[:2] == (8, 8)
    assert eager[0] < lazy[0]
    assert eager[1] == 8
    assert full[1] < 8
    assert eager[2] < lazy[2]  # although eager also runs the remaining FRC, one after another


def test_everything_stored_leaves_nothing_to_recompute() -> None:
    before = initial(1, 3)
    cut = interpret(plan_iteration(before, micro_batches=4, mode="full"))
    after, _ = before.without(["w1"])
    assert after is not None
    four = dict.fromkeys(before.grid, CoordinateProgress(forwards=4, backwards=4))
    assert {c: (p.forwards, p.backwards) for c, p in cut.redundant.items()} == dict.fromkeys(before.grid, (4, 4))
    progress, redundant = progress_after_loss(before, after, progress=cut.progress, stored=four)
    plan = plan_iteration(
        after,
        micro_batches=4,
        progress=progress,
        redundant=redundant,
        mode="full",
    )
    assert plan.programs == (("w0", text()), ("w2", text()))


def test_shadows_go_on_where_they_are_after_a_loss() -> None:
    before = initial(1, 4)
    cut = interpret(plan_iteration(before, micro_batches=8, mode="eager"), until=16)
    after, _ = before.without(["w3"])  # w2 takes over 0.3; shadows of 0.1 and 0.2 stay, that of 0.0 is gone
    assert after is not None
    progress, redundant = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
    assert set(redundant) == {Coordinate(0, 1), Coordinate(0, 2)}
    plan = plan_iteration(after, micro_batches=8, progress=progress, redundant=redundant, mode="eager")
    for coordinate, done in redundant.items():
        assert 0 < done.forwards < 8
        runs = [i.micro_batch for _, p in plan.programs for i in p if i.op is Op.FRC and i.coordinate == coordinate]
        assert runs == list(range(done.forwards, 8))


def test_input_that_a_shadow_had_waiting_is_sent_again() -> None:
    grid = Grid(1, 2)
    owners = {Coordinate(0, 0): "a", Coordinate(0, 1): "b"}
    placement = Placement.of(grid, owners=owners, shadows={Coordinate(0, 1): "c"})
    waiting = {Coordinate(0, 1): CoordinateProgress(loaded=2, activations_received=2, forwards=1)}
    progress = {
        Coordinate(0, 0): CoordinateProgress(2, 0, 2, 0, 0),
        Coordinate(0, 1): CoordinateProgress(2, 2, 2, 0, 0),
    }
    plan = plan_iteration(placement, micro_batches=2, progress=progress, redundant=waiting, mode="eager")
    verify(plan, progress, redundant=waiting)
    assert plan.program("c") == text("LOAD 0.1 1", "RECV_ACTIVATION 0.1 1 shadow", "FRC 0.1 1")


def test_costs_are_whole_slots() -> None:
    with pytest.raises(ValueError, match="at least 1 slot"):
        Costs(forward=0)
