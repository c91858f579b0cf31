"""Two launchers, of which one is lost, or never comes, while the job starts; DeepSpeed's real ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_bamboo.cli.main import main
from tests.coordination.helpers import stretched
from tests.elastic.launched import LaunchedJob

PREPARE = """
    print("preparing", rank, flush=True)
    time.sleep(600)
"""
NAME = "starts"


def launched(launch_job: Callable[..., LaunchedJob], folder: Path, node: int, **more: Any) -> LaunchedJob:
    return launch_job(
        folder / str(node),
        PREPARE,
        nodes=2,
        node_rank=node,
        options=("--job", NAME),
        environment={"BAMBOO_NODE": f"vm-{node}"},
        **more,
    )


def test_a_machine_lost_while_the_job_starts_ends_it_and_is_named(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    with launched(launch_job, tmp_path, 0) as first, launched(launch_job, tmp_path, 1) as second:
        for job in (first, second):
            job.wait_for("preparing", times=2)
        os.kill(second.process.pid, signal.SIGKILL)
        lost = time.monotonic()
        assert first.wait(within_seconds=60) == 75, first.output
        assert time.monotonic() - lost < stretched(15)
        assert "the job ends: lost slots 2, 3 on vm-1 before training began, and all 4 slots" in first.output
        assert first.output.count("the job ends:") == 1, first.output
        assert "start again, attempt" not in first.output, "whoever is left does not start again in vain"
        second.wait(within_seconds=30)


def test_a_machine_that_never_comes_is_waited_for_aloud_until_the_job_is_stopped(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path, capfd: Any
) -> None:
    with launched(launch_job, tmp_path, 0) as first:
        first.wait_for("waiting for 2 of 4 slots: 2, 3;")
        assert main(["status", "--job", NAME]) == 0
        assert "waiting for 2 of 4 slots to begin: 2, 3" in capfd.readouterr().out
        assert main(["stop", "--job", NAME]) == 0
        assert first.wait(within_seconds=60) == 1, first.output
        assert first.output.count("it was stopped before training began (ds_bamboo stop)") == 1, first.output
