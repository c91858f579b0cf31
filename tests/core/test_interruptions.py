"""Over every interruption point: the rest of the iteration verifies, and each pass runs once, in order."""

import gc
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from deepspeed_bamboo.core.instructions import TAIL
from deepspeed_bamboo.core.interpret import interpret
from deepspeed_bamboo.core.planning import plan_iteration
from deepspeed_bamboo.core.recovery import progress_after_loss, progress_by_holders
from deepspeed_bamboo.core.verify import verify
from tests.core.interruptions import (
    Case,
    block_cases,
    cases,
    fresh_cuts,
    fresh_plan,
    initial,
    run_to_the_end,
    scattered_cases,
    stops_of,
)

FAST = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
SWEEP = settings(FAST, derandomize=False, max_examples=10_000)
MODES = ("off", "lazy", "eager", "eager-bubbles", "eager-recompute", "full")


@pytest.fixture(scope="module", autouse=True)
def _rare_collections() -> Iterator[None]:
    """Thousands of plans are kept; walking them again and again would be most of a sweep's time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    yield
    gc.set_threshold(*before)


@settings(FAST, max_examples=600)
@given(cases(pipelines=1, stages=(2, 6), micro_batches=8, modes=("lazy",), losses=1))
def test_one_pipeline_hit_once(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=400)
@given(cases(pipelines=3, stages=(1, 8), micro_batches=16, modes=MODES, losses=1))
def test_any_grid_hit_once(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=400)
@given(cases(pipelines=3, stages=(2, 6), micro_batches=8, modes=MODES, losses=3))
def test_hit_again_in_the_middle_of_a_recovery(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=300)
@given(cases(pipelines=3, stages=(1, 8), micro_batches=16, modes=MODES, losses=1) | scattered_cases(modes=MODES))
def test_cuts_are_those_of_the_interpreter(case: Case) -> None:
    plan = fresh_plan(case.placement, case.micro_batches, case.mode)
    stops = stops_of(plan, case.hits[0])
    found, expected = fresh_cuts(case.placement, case.micro_batches, case.mode).at(stops), interpret(plan, stops=stops)
    assert found.positions == expected.positions
    assert (found.progress, found.redundant) == (expected.progress, expected.redundant)


@settings(FAST, max_examples=400)
@given(scattered_cases(modes=MODES))
def test_coordinates_and_shadows_anywhere(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=150)
@given(block_cases(modes=MODES))
def test_blocks_of_stages(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=200)
@given(cases(pipelines=2, stages=(2, 6), micro_batches=8, modes=MODES[1:5], losses=3, copies=2))
def test_two_shadows_hit_again_and_again(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=150)
@given(scattered_cases(modes=MODES[1:5], copies=2))
def test_two_shadows_anywhere(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(3, 3), (4, 4)])
def test_two_shadows_and_any_two_workers_lost_at_every_instruction(stages: int, micro_batches: int, mode: str) -> None:
    before = initial(1, stages, 2)
    plan = fresh_plan(before, micro_batches, mode)
    for one, other in itertools.combinations(range(stages), 2):
        after, _ = before.without([f"w{one}", f"w{other}"])
        assert after is not None and len(after.all_copies()) == stages
        for worker in (f"w{one}", f"w{other}"):
            for stop in range(len(plan.program(worker)) + 1):
                cut = fresh_cuts(before, micro_batches, mode).at({worker: stop})
                owned = {f"w{i}": {c: cut.progress[c] for c in before.hosted_by(f"w{i}")} for i in range(stages)}
                stored = {f"w{i}": {c: cut.redundant[c] for c in before.next_in_line(f"w{i}")} for i in range(stages)}
                progress, redundant = progress_by_holders(after, owned=owned, stored=stored)
                rest = plan_iteration(
                    after, micro_batches=micro_batches, progress=progress, redundant=redundant, mode=mode
                )
                end = verify(rest, progress, redundant=redundant)
                assert all(p.backwards == micro_batches for p in end.progress.values())


def lose_every_stage_at_every_instruction(*, stages: int, micro_batches: int) -> int:
    """One pipeline, mode lazy, nothing drawn: twice per point, once with the survivors as far as they get
    without the lost worker, once with them where they are when it dies. Returns the number of points."""
    before = initial(1, stages)
    plan = fresh_plan(before, micro_batches, "lazy")
    whole = interpret(plan)
    points = 0
    for worker, program in plan.programs:
        after, _ = before.without([worker])
        assert after is not None
        at = [timed.end for timed in whole.timeline if timed.worker == worker]
        for i in range(len(program) + 1):
            for cut in (interpret(plan, stops={worker: i}), interpret(plan, until=at[i - 1] if i else 0)):
                progress, _ = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
                end = verify(plan_iteration(after, micro_batches=micro_batches, progress=progress), progress)
                assert all(p.backwards == micro_batches for p in end.progress.values())
                points += 1
    return points


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_instruction_of_every_stage(stages: int, micro_batches: int) -> None:
    # A middle stage has 6 instructions a micro-batch, first and last 5, and the tail 5; every program one end.
    expected = 2 * ((6 * stages - 2) * micro_batches + (len(TAIL) + 1) * stages)
    assert lose_every_stage_at_every_instruction(stages=stages, micro_batches=micro_batches) == expected


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@pytest.mark.parametrize("stages", range(2, 7))
def test_every_instruction_of_every_stage_in_full(stages: int) -> None:
    for micro_batches in range(1, 9):
        assert lose_every_stage_at_every_instruction(stages=stages, micro_batches=micro_batches) > 0


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@settings(SWEEP)
@given(cases(pipelines=3, stages=(1, 8), micro_batches=16, modes=MODES, losses=1))
def test_any_grid_hit_once_10000_times(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@settings(SWEEP)
@given(cases(pipelines=3, stages=(2, 6), micro_batches=8, modes=MODES, losses=3))
def test_hit_again_in_the_middle_of_a_recovery_10000_times(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@settings(SWEEP)
@given(scattered_cases(modes=MODES))
def test_coordinates_and_shadows_anywhere_10000_times(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@settings(SWEEP)
@given(
    cases(pipelines=3, stages=(2, 6), micro_batches=8, modes=MODES[1:5], losses=3, copies=2)
    | scattered_cases(modes=MODES[1:5], copies=2)
)
def test_two_shadows_10000_times(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.sweep
@pytest.mark.timeout(1800)  # a busy machine makes it slow, not wrong
@settings(SWEEP)
@given(block_cases(modes=MODES))
def test_blocks_of_stages_10000_times(case: Case) -> None:
    run_to_the_end(case)
