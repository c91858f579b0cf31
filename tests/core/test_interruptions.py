"""Over every interruption point: the rest of the iteration verifies, and each pass runs once, in order."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.core.interruptions import Case, cases, run_to_the_end, scattered_cases

FAST = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
MODES = ("off", "lazy")


@settings(FAST, max_examples=600)
@given(cases(pipelines=1, stages=(2, 6), micro_batches=8, modes=("lazy",), losses=1))
def test_one_pipeline_hit_once(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=300)
@given(cases(pipelines=3, stages=(1, 8), micro_batches=16, modes=MODES, losses=1))
def test_any_grid_hit_once(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=300)
@given(cases(pipelines=3, stages=(2, 6), micro_batches=8, modes=MODES, losses=3))
def test_hit_again_in_the_middle_of_a_recovery(case: Case) -> None:
    run_to_the_end(case)


@settings(FAST, max_examples=300)
@given(scattered_cases(modes=MODES))
def test_coordinates_and_shadows_anywhere(case: Case) -> None:
    run_to_the_end(case)


@pytest.mark.sweep
@settings(FAST, max_examples=10_000, derandomize=False)
@given(cases(pipelines=3, stages=(1, 8), micro_batches=16, modes=MODES, losses=1))
def test_any_grid_hit_once_10000_times(case: Case) -> None:
    run_to_the_end(case)
