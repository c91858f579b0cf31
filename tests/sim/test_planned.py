"""This project's policy by core's plans: what it places, what it times, and what is fatal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.timing import Profile, iteration_seconds
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.fitted import TableModel, fitted_profile
from deepspeed_bamboo.sim.jobs import Job
from deepspeed_bamboo.sim.own import planned_grid
from deepspeed_bamboo.sim.planned import PlannedGrid, micro_batches_of
from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.runner import run_one
from deepspeed_bamboo.sim.scenario import load_preset, preset_names
from deepspeed_bamboo.sim.steptimes import Grid as TableGrid

from .common import machines, preset_job, recorded


def sites(count: int, *, zones: int = 1) -> list[WorkerSite]:
    return [WorkerSite(f"w{i}", f"n{i}", f"z{i % zones}" if zones > 1 else "") for i in range(count)]


def planned(grid: Grid, *, micro_batches: int = 4, protected: bool = True) -> PlannedGrid:
    return PlannedGrid(grid, Profile.even(grid.stages), micro_batches, protected=protected)


@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_any_number_of_workers_gets_what_core_places(pipelines: int, stages: int, workers: int, lost: int) -> None:
    """Also after some are gone: everything is hosted, times are those of the placement, no loss of one is fatal."""
    own = planned(Grid(pipelines, stages))
    placement = own.arranged(sites(workers), None)
    left = sites(workers)[: max(1, workers - lost)]
    after = own.arranged(left, placement)
    for found, count in ((placement, workers), (after, len(left))):
        assert own.shape(count).seconds == pytest.approx(
            iteration_seconds(found, own.profile, micro_batches=own.micro_batches)
        )
        if count > 1:
            assert len(found.shadows) == len(own.grid)
            assert all(found.without([worker])[0] is not None for worker in found.workers)


def test_few_coordinates_move_when_one_of_many_workers_goes() -> None:
    own = planned(Grid(1, 12))
    placement = own.arranged(sites(6), None)
    survivors = [site for site in sites(6) if site.worker != placement.owners[0][1]]
    back = own.arranged([*survivors, WorkerSite("new", "new")], placement)
    moved = [c for c, worker in back.owners if worker not in (placement.owner(c), placement.shadow(c))]
    assert len(moved) <= len(placement.hosted_by(placement.owners[0][1]))  # no more state than the lost worker's


@pytest.mark.parametrize("preset", preset_names())
def test_presets_start_and_their_tables_are_reproduced(preset: str) -> None:
    """A profile fitted to a table has its step times within a quarter (most: 3 %), by core's own plans."""
    scenario = load_preset(preset)
    model = scenario.model
    for row in model.table:
        own = scenario.policies.live
        assert own is not None
        if model.samples_per_step % row.pipelines:
            continue  # would not start
        spec = own.model_copy(update={"pipelines": row.pipelines, "stages": row.stages})
        found = planned_grid(preset_job(preset, run__duration_hours=1.0), spec)
        assert found is not None
        seconds = found[1].seconds(found[0].shape(row.pipelines * row.stages).seconds, most_hosted=1)
        plain = row.milliseconds / 1000.0 / (1.0 + model.redundancy_overhead)
        assert seconds / (1.0 + spec.lazy_overhead) == pytest.approx(plain, rel=0.25)


def test_a_fit_finds_the_work_that_a_table_was_made_of() -> None:
    """Steps of (M + P - 1) x 20 ms with micro-batches of 2, and nothing else."""
    rows = {TableGrid(d, 12): (132 // d + 11) * 0.02 for d in (1, 2, 3, 4)}
    model = TableModel("made", 264, 24, 0, 16, overhead=0.0)
    found = fitted_profile(model, rows, own=TableGrid(6, 24))
    assert found is not None
    assert found.micro_batch_samples == 2
    assert found.fixed_seconds == pytest.approx(0.0, abs=1e-9)
    assert sum(layer.forward_seconds + layer.backward_seconds for layer in found.layers) == pytest.approx(12 * 0.02)


def test_a_grid_that_does_not_start_is_refused() -> None:
    job = preset_job("bert", policies__live__pipelines=5, model__micro_batch_samples=2, run__duration_hours=1.0)
    with pytest.raises(ScenarioError, match="would not start"):
        run_one(job, policy="deepspeed-bamboo", seed=1)
    assert micro_batches_of(samples_per_step=264, pipelines=6, micro_batch_samples=2) == 22
    assert micro_batches_of(samples_per_step=264, pipelines=5, micro_batch_samples=2) is None


def lost_pair(**over: object) -> RunResult:
    """Owner and shadow of a stage of 2 x 4 are lost in one instant, after an hour."""

    def job(*losses: tuple[float, str, str]) -> Job:
        return preset_job(
            "bert",
            trace=recorded(machines(*((0.0, "add", f"n{index}") for index in range(8)), *losses), hours=2.0),
            policies__live__pipelines=2,
            policies__live__stages=4,
            policies__live__state_memory_bytes=1e12,
            **over,
        )

    spec = job().scenario.policies.live
    assert spec is not None
    found = planned_grid(job(), spec)
    assert found is not None
    placement = found[0].arranged([WorkerSite(f"n{index}", f"n{index}") for index in range(8)], None)
    coordinate, owner = placement.owners[0]
    pair = (owner, placement.shadow(coordinate) or "")
    return run_one(job(*((3600.0, "remove", worker) for worker in pair)), policy="deepspeed-bamboo", seed=1)


def test_in_bf16_and_with_zero_no_other_pipeline_helps() -> None:
    found = [lost_pair(model__precision="bf16"), lost_pair(model__zero_stage=1), lost_pair()]
    assert [result.fatal_losses for result in found][:2] == [1, 1]
    assert found[2].fatal_losses == 0


def test_memory_checkpoints_lose_less_than_the_store() -> None:
    away = lost_pair(model__precision="bf16")
    in_place = lost_pair(model__precision="bf16", policies__live__fatal="in-place")
    assert (away.fatal_losses, in_place.fatal_losses) == (1, 1)
    assert in_place.wasted_steps < away.wasted_steps
    assert in_place.paused_hours < away.paused_hours
    assert in_place.samples > away.samples


def test_fewer_workers_train_at_the_pace_that_core_says() -> None:
    changes: list[tuple[float, str, str]] = [(0.0, "add", f"n{index}") for index in range(3)]
    job = preset_job(
        "bert",
        trace=recorded(machines(*changes), hours=2.0),
        policies__live__pipelines=2,
        policies__live__stages=6,
        policies__live__state_memory_bytes=1e12,
    )
    result = run_one(job, policy="deepspeed-bamboo", seed=1)
    spec = job.scenario.policies.live
    assert spec is not None
    found = planned_grid(job, spec)
    assert found is not None
    placement = found[0].arranged(sites(3), None)
    hosted = max(len(placement.hosted_by(worker)) for worker in placement.workers)
    seconds = found[1].seconds(found[0].shape(3).seconds, most_hosted=hosted)
    trained = 2 * 3600 - 45 - spec.join_seconds - spec.start_seconds
    assert result.steps == pytest.approx(trained / seconds, abs=1.5)
