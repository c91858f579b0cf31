"""The verifier lets no plan through in which an instruction is missing, doubled or in the wrong place."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import RECEIVES, SENDS, TAIL, Instruction, Op
from deepspeed_bamboo.core.interpret import interpret
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_inference, plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_after_loss
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.verify import ScheduleError, verify
from tests.core.interruptions import initial

Program = list[Instruction]


def edited(plan: Plan, worker: str, edit: Callable[[Program], Program]) -> Plan:
    programs = tuple((w, tuple(edit(list(p))) if w == worker else p) for w, p in plan.programs)
    return dataclasses.replace(plan, programs=programs)


def failover_plan() -> tuple[Plan, dict[Coordinate, CoordinateProgress]]:
    """The rest of an iteration of 4 stages, hit in the middle; w1 hosts 0.1 and the lost 0.2."""
    before = initial(1, 4)
    cut = interpret(plan_iteration(before, micro_batches=4), until=9)
    after, _ = before.without(["w2"])
    assert after is not None
    progress, _ = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
    return plan_iteration(after, micro_batches=4, progress=progress), progress


def scattered_plan(mode: str) -> Plan:
    """Neighbours on one worker, a worker with two stages apart, shadows apart from what they depend on."""
    grid = Grid(1, 4)
    a, b, c, d = grid
    owners = {a: "u", b: "v", c: "u", d: "u"}
    return plan_iteration(
        Placement.of(grid, owners=owners, shadows={a: "v", b: "u", c: "w", d: "w"}), micro_batches=3, mode=mode
    )


PLANS = {
    "fresh": (plan_iteration(initial(1, 3), micro_batches=4), None),
    "alone": (plan_iteration(initial(1, 1), micro_batches=2), None),
    "failover": failover_plan(),
    "scattered": (scattered_plan("lazy"), None),
    "eager": (plan_iteration(initial(1, 3), micro_batches=3, mode="eager"), None),
    "eager scattered": (scattered_plan("eager"), None),
    "full": (plan_iteration(initial(1, 3), micro_batches=3, mode="full"), None),
    "full scattered": (scattered_plan("full"), None),
    "pure data parallelism": (plan_iteration(initial(3, 1), micro_batches=2, mode="full"), None),
    "inference": (plan_inference(initial(1, 3), micro_batches=3), None),
}
NAMES = list(PLANS)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_itself_passes(name: str) -> None:
    plan, progress = PLANS[name]
    assert len(verify(plan, progress).timeline) == sum(len(program) for _, program in plan.programs)


@pytest.mark.parametrize("name", NAMES)
def test_every_deletion_is_rejected(name: str) -> None:
    plan, progress = PLANS[name]
    for worker, program in plan.programs:
        for i in range(len(program)):
            with pytest.raises(ScheduleError):
                verify(edited(plan, worker, lambda p, i=i: p[:i] + p[i + 1 :]), progress)


@pytest.mark.parametrize("name", NAMES)
def test_every_duplicate_is_rejected(name: str) -> None:
    plan, progress = PLANS[name]
    for worker, program in plan.programs:
        for i in range(len(program)):
            for place in {i, i + 1, len(program), len(program) - len(TAIL)}:
                with pytest.raises(ScheduleError):
                    verify(edited(plan, worker, lambda p, i=i, j=place: [*p[:j], p[i], *p[j:]]), progress)


def depends(first: Instruction, second: Instruction, plan: Plan, worker: str) -> bool:
    """Whether ``second`` must come after ``first`` in the program of ``worker``, whatever else happens."""
    if second.op in TAIL:
        return True
    if first.op is second.op and first.coordinate == second.coordinate and first.to_shadow == second.to_shadow:
        return True
    if {first.op, second.op} <= SENDS or {first.op, second.op} <= RECEIVES:
        return channel(first, plan, worker) == channel(second, plan, worker)
    inputs = {
        Op.FNC: {Op.LOAD, Op.RECV_ACTIVATION},
        Op.BNC: {Op.FNC, Op.RECV_GRAD},
        Op.FRC: {Op.LOAD, Op.RECV_ACTIVATION},
        Op.BRC: {Op.FRC, Op.RECV_GRAD},
        Op.SEND_ACTIVATION: {Op.FNC},
        Op.SEND_GRAD: {Op.BNC},
    }
    same = first.coordinate == second.coordinate and first.micro_batch == second.micro_batch
    return same and first.op in inputs.get(second.op, ())


def channel(instruction: Instruction, plan: Plan, worker: str) -> tuple[str | None, str | None]:
    c = instruction.coordinate
    assert c is not None
    forward = instruction.op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
    sending = instruction.op in SENDS
    other = Coordinate(c.pipeline, c.stage + (1 if forward == sending else -1))
    if sending:
        return worker, plan.placement.shadow(other) if instruction.to_shadow else plan.placement.owner(other)
    return plan.placement.owner(other), worker


@pytest.mark.parametrize("name", NAMES)
def test_every_swap_that_matters_is_rejected(name: str) -> None:
    plan, progress = PLANS[name]
    rejected = 0
    for worker, program in plan.programs:
        for i in range(len(program) - 1):
            if depends(program[i], program[i + 1], plan, worker):
                rejected += 1
                with pytest.raises(ScheduleError):
                    verify(edited(plan, worker, lambda p, i=i: [*p[:i], p[i + 1], p[i], *p[i + 2 :]]), progress)
    assert rejected > 2


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(NAMES), st.data())
def test_moving_any_instruction_is_rejected_or_harmless(name: str, data: st.DataObject) -> None:
    plan, progress = PLANS[name]
    worker, program = data.draw(st.sampled_from([p for p in plan.programs if len(p[1]) > 1]))
    source = data.draw(st.integers(0, len(program) - 1))
    target = data.draw(st.integers(0, len(program) - 1))

    def move(p: Program) -> Program:
        instruction = p.pop(source)
        p.insert(target, instruction)
        return p

    low, high = sorted((source, target))
    passed = program[low : high + 1]
    moved = edited(plan, worker, move)
    if source < target:
        broken = any(depends(program[source], other, plan, worker) for other in passed[1:])
    else:
        broken = any(depends(other, program[source], plan, worker) for other in passed[:-1])
    if broken:
        with pytest.raises(ScheduleError):
            verify(moved, progress)
        return
    try:
        after = verify(moved, progress)
    except ScheduleError:
        return  # for example a receive before the send that the sender waits for
    assert after.progress == verify(plan, progress).progress


def test_program_for_nobody_and_nobodys_program_are_rejected() -> None:
    plan = PLANS["fresh"][0]
    for programs in (plan.programs[1:], (*plan.programs, ("stranger", ())), (*plan.programs, plan.programs[0])):
        with pytest.raises(ScheduleError, match="has one program"):
            verify(dataclasses.replace(plan, programs=programs))


def test_progress_that_the_plan_was_not_made_for_is_rejected() -> None:
    plan, progress = failover_plan()
    assert progress is not None
    with pytest.raises(ScheduleError, match="not computed yet"):
        verify(plan)


def test_redundant_pass_of_a_plan_without_them_is_rejected() -> None:
    plan = PLANS["fresh"][0]
    for extra in ("FRC 0.1 0", "LOAD 0.1 0", "SEND_GRAD 0.1 0 shadow", "RECV_GRAD 0.1 0 shadow"):
        with pytest.raises(ScheduleError):
            verify(edited(plan, "w0", lambda p, extra=extra: [*p[:3], Instruction.parse(extra), *p[3:]]))


def test_waiting_in_a_circle_is_rejected_and_says_who_waits() -> None:
    plan = plan_iteration(initial(1, 2), micro_batches=1)
    turned = edited(plan, "w1", lambda p: [p[4], *p[:4], *p[5:]])  # the gradient before its backward
    with pytest.raises(ScheduleError, match="not computed yet"):
        verify(turned)
    early = edited(plan, "w0", lambda p: [p[3], *p[:3], *p[4:]])  # waits for the gradient before its forward
    with pytest.raises(ScheduleError) as error:
        verify(early)
    assert error.value.rule == "waits for ever; w1 waits at RECV_ACTIVATION 0.1 0"


def test_error_names_rule_worker_and_instruction_and_draws_the_cell() -> None:
    plan = plan_iteration(initial(1, 2), micro_batches=2)
    i = plan.program("w1").index(Instruction.parse("BNC 0.1 0"))
    with pytest.raises(ScheduleError) as error:
        verify(edited(plan, "w1", lambda p: [*p[:i], Instruction.parse("BNC 0.1 1"), *p[i + 1 :]]))
    assert error.value.worker == "w1"
    assert error.value.instruction == Instruction.parse("BNC 0.1 1")
    assert str(error.value).splitlines() == [
        "worker w1 at BNC 0.1 1: backwards go in micro-batch order, each once: next is 0",
        "         0   1   2",
        "0.0 w0  F0  F1   .",
        "0.1 w1   .  F0 !B1",
    ]


def test_only_plans_that_train_have_a_tail() -> None:
    plan = PLANS["inference"][0]
    with pytest.raises(ScheduleError, match="has no tail"):
        verify(edited(plan, "w0", lambda p: [*p, Instruction(Op.STEP)]))
