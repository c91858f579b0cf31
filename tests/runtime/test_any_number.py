"""A job starts on any number of workers, with the bits of one that has a worker for each coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Grid
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_briefly, train_changed, train_with_checkpoints, train_with_joiners

KILL_MIDDLE = [{"step": 1, "pipeline": 0, "stage": 1, "at": "backward", "micro_batch": 1, "signal": "KILL"}]
HALF = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BRAIN = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
CHECKPOINTING = {"activation_checkpoint_interval": 1}
NAMES = ("half", "brain", "tied", "drawn", "tied_drawn", "dropout", "seeded", "plain")
OTHERS = ((1, 4, 1), (2, 2, 3), (1, 2, 3))


def trainings(grid: Grid) -> list[Training]:
    """What the bits are compared for; the plain one is the last."""
    bamboo = {"topology": {"pipelines": grid.pipelines}}
    plain = Training(
        "plain", grid.stages, count=2 * grid.stages, steps=2, bamboo=bamboo, faults=[], evaluate_before=(1,)
    )
    return [
        replace(plain, name="half", settings=HALF),
        replace(plain, name="brain", settings=BRAIN),
        replace(plain, name="tied", layers="tied", evaluate_before=()),
        replace(plain, name="drawn", layers="drawn"),
        replace(plain, name="tied_drawn", layers="tied_drawn", evaluate_before=()),
        replace(plain, name="dropout", dropout=0.2, module=CHECKPOINTING),
        replace(plain, name="seeded", dropout=0.2, module={"seed_layers": True}),
        plain,
    ]


def on(
    jobs: Jobs, grid: Grid, world: int, *, faults: list[dict[str, Any]], names: Sequence[str] = NAMES
) -> dict[str, Any]:
    """Losses, evaluations and digests on ``world`` workers; ``faults`` strike in the last one of the trainings."""
    *others, last = (training for training in trainings(grid) if training.name in names)
    environment = {"BAMBOO_PIPELINES": str(grid.pipelines)}
    every = [*others, replace(last, faults=faults)]
    result = jobs.run(train_briefly, world=world, environment=environment, trainings=every)
    values = [result.common(training.name) for training in every]
    assert len(result.survivors) == world - len(faults)
    return dict(zip((training.name for training in every), values, strict=True))


@pytest.fixture(scope="module")
def expected(jobs: Jobs) -> dict[Grid, dict[str, Any]]:
    """With a worker for each coordinate, by grid, as asked for."""
    return {}


def undisturbed(jobs: Jobs, known: dict[Grid, dict[str, Any]], grid: Grid, names: Sequence[str]) -> dict[str, Any]:
    """Of those trainings; all that a grid has are run at its first use."""
    if not set(names) <= known.get(grid, {}).keys():
        known[grid] = on(jobs, grid, len(grid), faults=[], names=names)
    return {name: value for name, value in known[grid].items() if name in names}


# All trainings on fewer workers than stages. Elsewhere those whose bits could depend on that way of sharing stages out:
# one worker has all copies of tied layers and draws for all stages; over pipelines gradients are added up. A worker
# that stands by computes nothing until there is a loss.
@pytest.mark.parametrize(
    ("pipelines", "stages", "world", "names"),
    [
        pytest.param(1, 4, 3, NAMES, id="1-4-3"),
        pytest.param(1, 4, 1, ("tied_drawn", "seeded", "plain"), id="1-4-1"),
        pytest.param(2, 2, 3, ("brain", "tied", "plain"), id="2-2-3"),
        pytest.param(1, 2, 3, ("half", "plain"), id="1-2-3"),
        *(pytest.param(*case, NAMES, id=f"{case}-all", marks=pytest.mark.sweep) for case in OTHERS),
    ],
)
def test_the_number_of_workers_does_not_show(
    jobs: Jobs, expected: dict[Grid, dict[str, Any]], pipelines: int, stages: int, world: int, names: Sequence[str]
) -> None:
    """Fewer workers, or more, and a loss where another worker is there to survive it."""
    grid = Grid(pipelines, stages)
    found = on(jobs, grid, world, faults=KILL_MIDDLE if world > 1 else [], names=names)
    assert found == undisturbed(jobs, expected, grid, names)


def test_what_a_script_changes_before_initialize_reaches_every_stage(jobs: Jobs) -> None:
    """First weights by name, and groups of parameters; on two workers as on four; with a loss."""
    training = Training("changed", 4, count=4, faults=[])
    lossy = replace(training, faults=[{"step": 1, "pipeline": 0, "stage": 2, "at": "forward", "signal": "KILL"}])
    expected = jobs.run(train_changed, world=4, training=training)
    found = jobs.run(train_changed, world=2, training=lossy)
    assert len(found.survivors) == 1
    assert "one worker is left, and its loss ends the job" in found.outputs[found.survivors[0]]
    assert found.common("losses") == expected.common("losses")
    assert found.common("digest") == expected.common("digest")


def test_workers_join_a_job_that_began_with_fewer(jobs: Jobs) -> None:
    """Two of four begin, one is lost and two more come: the bits of four, and by these times work for all three."""
    training = Training("grows", 4, count=8, steps=6, settings=HALF, dropout=0.2, faults=[])
    lossy = replace(training, faults=[{"step": 1, "pipeline": 0, "stage": 3, "at": "backward", "micro_batch": 1}])
    whole = jobs.run(train_briefly, world=4, trainings=[training]).common("grows")
    result = jobs.run(
        train_with_joiners,
        world=2,
        joining=2,
        joining_after_deaths=1,
        training=lossy,
        waits={"3": 2},
        seconds=[0.1, 0.1, 0.2, 0.2],
    )
    assert len(result.survivors) == 3, result.transcript()
    assert result.common("digest") == whole["digest"]
    assert all(result.values[rank]["hosted"] for rank in result.survivors), result.transcript()


def test_one_worker_of_two_pipelines_says_what_data_it_needs(jobs: Jobs) -> None:
    training = Training("unfed", 2, count=4, faults=[], bamboo={"topology": {"pipelines": 2}})
    result = jobs.run(train_changed, world=1, environment={"BAMBOO_PIPELINES": "2"}, training=training)
    assert not result.survivors
    assert "set_data_source" in result.transcript()


@pytest.mark.sweep
@pytest.mark.parametrize("world", range(8, 0, -1))
@pytest.mark.parametrize("pipelines", [1, 2])
def test_every_number_of_workers_up_to_that_of_coordinates(
    jobs: Jobs, expected: dict[Grid, dict[str, Any]], pipelines: int, world: int
) -> None:
    """1 x 8 and 2 x 4 on 8 to 1 workers."""
    grid = Grid(pipelines, 8 // pipelines)
    found = on(jobs, grid, world, faults=KILL_MIDDLE if world > 1 else [])
    assert found == undisturbed(jobs, expected, grid, NAMES)


RESUMED = Training(
    "resumed",
    4,
    layers="tied",
    dropout=0.2,
    steps=5,
    settings={**HALF, "gradient_clipping": 0.5},
    faults=[],
)


def resumes(jobs: Jobs, folder: Path, *, before: int, after: int, stages: int) -> tuple[Any, Any]:
    """Losses and digest of a job that ends on ``before`` workers and goes on with ``after``; and undisturbed ones."""
    training = replace(RESUMED, stages=stages, count=2 * stages)
    first = jobs.run(train_with_checkpoints, world=before, training=replace(training, steps=3), folder=str(folder))
    assert first.common("steps") == 3
    second = jobs.run(train_with_checkpoints, world=after, training=training, folder=str(folder))
    assert "this job goes on from step 3" in second.transcript()
    whole = jobs.run(train_briefly, world=stages, trainings=[training]).common("resumed")
    losses = {str(step): loss for step, loss in enumerate(whole["losses"])}
    return (
        ({**first.common("losses"), **second.common("losses")}, second.common("digest")),
        (losses, whole["digest"]),
    )


def test_a_checkpoint_of_three_workers_goes_on_with_two(jobs: Jobs, tmp_path: Path) -> None:
    found, wanted = resumes(jobs, tmp_path / "kept", before=3, after=2, stages=4)
    assert found == wanted


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "after"), [(n, m) for n in (1, 3, 4, 5, 8) for m in (1, 3, 4, 5, 8)])
def test_a_checkpoint_goes_on_with_any_number(jobs: Jobs, tmp_path: Path, before: int, after: int) -> None:
    found, wanted = resumes(jobs, tmp_path / "kept", before=before, after=after, stages=8)
    assert found == wanted
