"""Plans by example: fresh iterations, failovers, one worker for all, several pipelines."""

import pytest

from deepspeed_bamboo.core.communication import peer
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import RECEIVES, SENDS, TAIL, Instruction, Op
from deepspeed_bamboo.core.interpret import interpret
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_inference, plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_after_loss
from deepspeed_bamboo.core.schedule import Mode, Plan, stage_order
from deepspeed_bamboo.core.verify import verify


def initial(pipelines: int, stages: int) -> Placement:
    grid = Grid(pipelines, stages)
    return Placement.initial(grid, [f"w{i}" for i in range(len(grid))])


def text(*lines: str) -> tuple[Instruction, ...]:
    return tuple(Instruction.parse(line) for line in lines) + tuple(Instruction(op) for op in TAIL)


def test_fresh_program_of_a_middle_stage() -> None:
    plan = plan_iteration(initial(1, 3), micro_batches=2)
    assert plan.program("w1") == text(
        "RECV_ACTIVATION 0.1 0",
        "FNC 0.1 0",
        "SEND_ACTIVATION 0.1 0",
        "RECV_ACTIVATION 0.1 1",
        "FNC 0.1 1",
        "SEND_ACTIVATION 0.1 1",
        "RECV_GRAD 0.1 0",
        "BNC 0.1 0",
        "SEND_GRAD 0.1 0",
        "RECV_GRAD 0.1 1",
        "BNC 0.1 1",
        "SEND_GRAD 0.1 1",
    )


def test_fresh_programs_of_first_and_last_stage() -> None:
    plan = plan_iteration(initial(1, 2), micro_batches=1)
    first = ("LOAD 0.0 0", "FNC 0.0 0", "SEND_ACTIVATION 0.0 0", "RECV_GRAD 0.0 0", "BNC 0.0 0")
    last = ("LOAD 0.1 0", "RECV_ACTIVATION 0.1 0", "FNC 0.1 0", "BNC 0.1 0", "SEND_GRAD 0.1 0")
    assert plan.programs == (("w0", text(*first)), ("w1", text(*last)))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 1), (3, 8), (4, 2), (8, 16)])
def test_one_coordinate_a_worker_computes_in_stage_order(stages: int, micro_batches: int) -> None:
    placement = initial(2, stages)
    plan = plan_iteration(placement, micro_batches=micro_batches)
    verify(plan)
    for coordinate in placement.grid:
        passes = tuple(
            (i.op, i.micro_batch) for i in plan.program(placement.owner(coordinate)) if i.op in (Op.FNC, Op.BNC)
        )
        assert passes == stage_order(stages=stages, micro_batches=micro_batches, stage=coordinate.stage)


def test_middle_stage_lost_in_its_first_backward() -> None:
    before = initial(1, 3)
    plan = plan_iteration(before, micro_batches=2)
    # w2 has sent the gradient of micro-batch 0, w1 dies before BNC 0; everybody else is as far as that lets them.
    position = plan.program("w1").index(Instruction.parse("BNC 0.1 0"))
    cut = interpret(plan, stops={"w1": position})
    after, fatal = before.without(["w1"])
    assert after is not None and not fatal
    progress, _ = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
    assert progress[Coordinate(0, 1)] == CoordinateProgress()
    recovery = plan_iteration(after, micro_batches=2, progress=progress)
    verify(recovery, progress)
    assert recovery.program("w2") == text("SEND_GRAD 0.2 0", "SEND_GRAD 0.2 1")
    assert recovery.program("w0") == text(
        "SEND_ACTIVATION 0.0 0",
        "SEND_ACTIVATION 0.0 1",
        "RECV_ACTIVATION 0.1 0",
        "FNC 0.1 0",
        "RECV_ACTIVATION 0.1 1",
        "FNC 0.1 1",
        "RECV_GRAD 0.1 0",
        "BNC 0.1 0",
        "SEND_GRAD 0.1 0",
        "RECV_GRAD 0.0 0",
        "BNC 0.0 0",
        "RECV_GRAD 0.1 1",
        "BNC 0.1 1",
        "SEND_GRAD 0.1 1",
        "RECV_GRAD 0.0 1",
        "BNC 0.0 1",
    )


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_one_worker_for_everything(stages: int, micro_batches: int) -> None:
    grid = Grid(2, stages)
    placement = Placement.of(grid, owners=dict.fromkeys(grid, "alone"), shadows={})
    execution = verify(plan_iteration(placement, micro_batches=micro_batches))
    assert execution.timeline[-1].end == len(grid) * micro_batches * 3  # never idle


def test_worker_that_only_holds_a_shadow_runs_the_tail() -> None:
    grid = Grid(1, 1)
    placement = Placement.of(grid, owners={Coordinate(0, 0): "a"}, shadows={Coordinate(0, 0): "b"})
    plan = plan_iteration(placement, micro_batches=1)
    assert plan.program("b") == text()
    verify(plan)


def test_activations_in_flight_are_those_of_as_many_stages_as_there_are_blocks() -> None:
    grid = Grid(1, 4)
    owners = {Coordinate(0, 0): "a", Coordinate(0, 1): "b", Coordinate(0, 2): "b", Coordinate(0, 3): "c"}
    plan = plan_iteration(Placement.of(grid, owners=owners, shadows={}), micro_batches=12)
    for coordinate in grid:
        alive = [
            1 if i.op is Op.FNC else -1
            for i in plan.program(owners[coordinate])
            if i.coordinate == coordinate and i.op in (Op.FNC, Op.BNC)
        ]
        block = "abc".index(owners[coordinate])
        assert max(sum(alive[:n]) for n in range(1, len(alive) + 1)) == 3 - block


def test_inference_has_forwards_only() -> None:
    plan = plan_inference(initial(2, 3), micro_batches=4)
    verify(plan)
    assert plan.mode is Mode.INFERENCE
    assert {i.op for _, program in plan.programs for i in program} == {
        Op.LOAD,
        Op.FNC,
        Op.SEND_ACTIVATION,
        Op.RECV_ACTIVATION,
    }


def test_inference_after_a_failover() -> None:
    after, _ = initial(1, 4).without(["w2"])
    assert after is not None
    execution = verify(plan_inference(after, micro_batches=3))
    assert [p.forwards for p in execution.progress.values()] == [3, 3, 3, 3]


def test_pipelines_can_be_planned_one_by_one() -> None:
    placement = initial(3, 4)
    whole = plan_iteration(placement, micro_batches=5)
    for pipeline in range(3):
        part = plan_iteration(placement, micro_batches=5, pipelines=[pipeline])
        verify(part)
        assert part.pipelines == (pipeline,)
        assert part.programs == tuple((w, whole.program(w)) for w, _ in part.programs)
        assert len(part.programs) == 4


def test_pipelines_with_a_common_worker_are_planned_together() -> None:
    grid = Grid(3, 2)
    owners = {c: f"w{c.pipeline}{c.stage}" for c in grid} | {Coordinate(2, 0): "w01"}
    part = plan_iteration(Placement.of(grid, owners=owners, shadows={}), micro_batches=2, pipelines=[2])
    assert part.pipelines == (0, 2)
    assert set(dict(part.programs)) == {"w00", "w01", "w21"}
    verify(part)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"mode": "eagre"}, "off, lazy, eager, eager-bubbles, eager-recompute, full"),
        ({"micro_batches": 0}, "at least 1 micro-batch"),
        ({"pipelines": [1]}, r"0\.\.0"),
        ({"pipelines": []}, r"0\.\.0"),
        ({"progress": {Coordinate(0, 0): CoordinateProgress(forwards=1)}}, "load before"),
    ],
)
def test_impossible_request_is_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        plan_iteration(initial(1, 2), **{"micro_batches": 2, **change})


def test_survivor_without_report_is_refused() -> None:
    before = initial(1, 3)
    after, _ = before.without(["w1"])
    assert after is not None
    with pytest.raises(ValueError, match=r"0\.2"):
        progress_after_loss(before, after, progress={Coordinate(0, 0): CoordinateProgress()}, stored={})


def test_stored_results_of_a_shadow_are_where_its_coordinate_goes_on() -> None:
    before = initial(1, 3)
    after, _ = before.without(["w2"])
    assert after is not None
    reports = {Coordinate(0, 0): CoordinateProgress(), Coordinate(0, 1): CoordinateProgress()}
    stored = {Coordinate(0, 2): CoordinateProgress(forwards=3, backwards=1)}
    progress, _ = progress_after_loss(before, after, progress=reports, stored=stored)
    assert progress[Coordinate(0, 2)] == CoordinateProgress(3, 3, 3, 0, 1)


def test_plan_reads_back_from_its_text() -> None:
    plan = plan_iteration(initial(2, 2), micro_batches=2)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [("FNC 0.0 0", "FNC 0.0", "line 7 "), ("mode lazy\n", "", "begins with"), ('program "w0"\n', "", "line 5 ")],
)
def test_broken_plan_text_is_refused(old: str, new: str, rule: str) -> None:
    text = str(plan_iteration(initial(1, 2), micro_batches=1))
    assert old in text
    with pytest.raises(ValueError, match=rule):
        Plan.parse(text.replace(old, new, 1))


def test_missing_program_names_the_ones_there_are() -> None:
    with pytest.raises(KeyError, match="w0, w1"):
        plan_iteration(initial(1, 2), micro_batches=1).program("w9")


def test_peers_of_all_messages_pair_up() -> None:
    grid = Grid(1, 4)
    a, b, c, d = grid
    owners = {a: "u", b: "v", c: "u", d: "u"}
    placement = Placement.of(grid, owners=owners, shadows={a: "v", b: "u", c: "w", d: "w"})
    plan = plan_iteration(placement, micro_batches=2, mode="full")
    sent, received = [], []
    for worker, program in plan.programs:
        for i in program:
            if i.op in SENDS:
                sent.append((worker, peer(i, placement=placement)))
            elif i.op in RECEIVES:
                received.append((peer(i, placement=placement), worker))
    assert sorted(sent) == sorted(received)
    assert {("u", "w"), ("u", "u"), ("u", "v"), ("v", "w")} <= set(sent)


@pytest.mark.parametrize("line", ["FNC 0.0 0", "STEP", "SEND_GRAD 0.0 0", "RECV_GRAD 0.1 0", "SEND_GRAD 0.1 0 shadow"])
def test_without_neighbour_there_is_no_peer(line: str) -> None:
    grid = Grid(1, 2)
    placement = Placement.of(grid, owners=dict.fromkeys(grid, "a"), shadows={})
    with pytest.raises(ValueError, match="has no peer"):
        peer(Instruction.parse(line), placement=placement)
