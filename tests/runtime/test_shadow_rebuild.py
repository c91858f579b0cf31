"""Lost shadows come back beside the iteration that a loss interrupted, or else at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.recovery import shadow_rebuild as shadow_rebuild
from deepspeed_bamboo.runtime.recovery.shadow_rebuild import with_rebuilt
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_all
from tests.runtime.test_losses import CHECKED, kill

ONE_LOSS = [kill(1, 0, 1, "forward", 2)]


def train_where_some_fail(failing: list[str], **arguments: Any) -> Any:
    """As train_all; the workers in ``failing`` can't send state beside an iteration."""

    def send(*_: Any, **__: Any) -> None:
        raise RuntimeError("no way")

    if f"w{os.environ['RANK']}" in failing:
        shadow_rebuild._send = send
    return train_all(**arguments)


def run_with_loss(
    jobs: Jobs, directory: Path, faults: list[dict[str, Any]], *, failing: Sequence[str] = ()
) -> tuple[JobResult, Any]:
    """An undisturbed run and one with ``faults``, in four workers; and the events of new shadows in the second."""
    bamboo = {**CHECKED, "event_log": str(directory)}
    whole = Training("whole", 4, layers="normalised", bamboo=CHECKED, faults=[])
    killed = Training("killed", 4, layers="normalised", bamboo=bamboo, faults=faults)
    result = jobs.run(train_where_some_fail, world=4, failing=list(failing), trainings=[whole, killed])
    assert result.codes.count(-9) == len(faults), result.transcript()
    assert result.codes.count(0) == 4 - len(faults), result.transcript()
    for rank in result.survivors:
        for what in ("losses", "digest"):
            assert result.values[rank]["killed"][what] == result.values[rank]["whole"][what], result.transcript()
    lines = [line for file in directory.glob("events-*.jsonl") for line in file.read_text().splitlines()]
    return result, [event for event in map(json.loads, lines) if event["event"] == "protected"]


def test_new_shadows_are_copied_beside_the_interrupted_iteration(jobs: Jobs, tmp_path: Path) -> None:
    _, protected = run_with_loss(jobs, tmp_path, ONE_LOSS)
    assert {(event["worker"], event["step"]) for event in protected} == {("w0", 2), ("w2", 2), ("w3", 2)}
    # At the boundary all of it would have been waited for.
    assert all(event["waited_seconds"] < event["seconds"] for event in protected), protected


@pytest.mark.parametrize(
    "failing", [["w2"], *(pytest.param(workers, marks=pytest.mark.sweep) for workers in (["w0"], ["w0", "w2", "w3"]))]
)
def test_what_can_not_be_copied_beside_it_is_copied_at_its_end(jobs: Jobs, tmp_path: Path, failing: list[str]) -> None:
    result, protected = run_with_loss(jobs, tmp_path, ONE_LOSS, failing=failing)
    assert {(event["worker"], event["step"]) for event in protected} == {("w0", 2), ("w2", 2), ("w3", 2)}
    assert all(event["waited_seconds"] == event["seconds"] for event in protected), protected
    assert "can't be copied beside the iteration (no way)" in result.transcript()


@pytest.mark.parametrize(
    "second",
    [
        kill(1, 0, 3, "protect"),
        kill(2, 0, 0, "idle"),
        *(pytest.param(kill(1, 0, 3, at), marks=pytest.mark.sweep) for at in ("commit", "step")),
    ],
)
def test_another_loss_while_they_are_copied_or_just_after(jobs: Jobs, tmp_path: Path, second: dict[str, Any]) -> None:
    _, protected = run_with_loss(jobs, tmp_path, [*ONE_LOSS, second])
    assert len({event["worker"] for event in protected if event["step"] == second["step"] + 1}) == 2, protected


GRID = Grid(1, 3)
FIRST, MIDDLE, LAST = GRID
BARE = Placement.of(GRID, owners={FIRST: "w0", MIDDLE: "w0", LAST: "w2"}, shadows={FIRST: "w2"})


def test_what_holders_say_they_have_rebuilt_is_counted_upon() -> None:
    agreed = {"w0": {"rebuilt": (4, (LAST,))}, "w2": {"rebuilt": (4, (MIDDLE,))}}
    found = with_rebuilt(BARE, agreed, epoch=4)
    assert dict(found.shadows) == {FIRST: "w2", MIDDLE: "w2", LAST: "w0"}
    assert found.owners == BARE.owners
    assert with_rebuilt(found, agreed, epoch=4) == found


@pytest.mark.parametrize("value", [{}, {"rebuilt": (3, (Coordinate(0, 1),))}])
def test_of_an_epoch_that_is_over_nothing_counts(value: dict[str, Any]) -> None:
    assert with_rebuilt(BARE, {"w0": {}, "w2": value}, epoch=4) is BARE
