"""Random events in one real job: workers are killed, join, are drained, get notices, etcd dies; nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.sweep.happenings import draw
from deepspeed_bamboo.sweep.random_run import RandomRun, run_undisturbed, run_with
from deepspeed_bamboo.testing.fork_server import ForkServer

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("seed", "grid", "steps", "count", "bulk"),
    [
        pytest.param(9, Grid(1, 3), 16, 5, False, id="few"),
        pytest.param(1, Grid(1, 4), 300, 100, False, id="hundred", marks=pytest.mark.sweep),
        pytest.param(2, Grid(2, 2), 60, 20, False, id="two-pipelines", marks=pytest.mark.sweep),
        pytest.param(3, Grid(1, 4), 40, 12, True, id="few-in-bulk", marks=pytest.mark.sweep),
        pytest.param(2, Grid(1, 4), 300, 100, True, id="hundred-in-bulk", marks=pytest.mark.sweep),
        pytest.param(1, Grid(2, 3), 120, 40, True, id="two-pipelines-in-bulk", marks=pytest.mark.sweep),
    ],
)
def test_nothing_of_the_result_changes(
    fork_server: ForkServer, tmp_path: Path, seed: int, grid: Grid, steps: int, count: int, bulk: bool
) -> None:
    run = RandomRun(
        script=ROOT / "scripts" / "train.py",
        base=ROOT / "configs" / "cpu-demo.json",
        grid=grid,
        steps=steps,
        limit_seconds=120.0 if steps < 100 else 1500.0,
    )
    workers = len(grid)
    happenings = draw(
        seed,
        grid=grid,
        steps=steps,
        count=count,
        micro_batches=run.micro_batches,
        workers=workers,
        most=workers + 2,
        bulk=bulk,
    )
    reference = run_undisturbed(run, server=fork_server, folder=tmp_path / "undisturbed")
    verdict = run_with(run, happenings, reference=reference, server=fork_server, folder=tmp_path / "disturbed")
    assert verdict.problems == ()
    assert sum(number for name, number in verdict.happened.items() if name != "lost at once") == count
    assert bool(verdict.ways_back) == bulk
    assert verdict.digest == reference.digest
