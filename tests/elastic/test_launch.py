"""Slots under DeepSpeed's real launcher, on one machine."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed_bamboo.coordination.server import free_port
from tests.coordination.helpers import alive, stretched
from tests.elastic.launched import LaunchedJob

TRAIN = """
    training = FakeTraining()
    training.begin()
    print("in epoch 0", os.environ["MASTER_PORT"], os.environ["BAMBOO_ENDPOINTS"], flush=True)
    training.wait()
"""


@pytest.mark.sweep
def test_two_jobs_at_once_do_not_disturb_each_other_and_survive_a_loss_each(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    script = TRAIN.replace(
        "training.wait()",
        """
    print(f"rank {rank} has {sys.argv[1:]}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while training.job.epoch().number < 1:
        time.sleep(0.01)
    print("goes on because", training.job.epoch().reason, flush=True)
    training.job.finish({})
    training.wait()
    """,
    )
    more: dict[str, Any] = {"options": ("--job", "my-job"), "arguments": ("--steps", "3", "-x")}
    with launch_job(tmp_path / "a", script, **more) as one, launch_job(tmp_path / "b", script) as two:
        assert one.wait(within_seconds=180) == 0, one.output
        assert two.wait(within_seconds=180) == 0, two.output
    for rank in (0, 1):
        wanted = [f"--local_rank={rank}", "--deepspeed_config", str(tmp_path / "a" / "ds.json"), "--steps", "3", "-x"]
        assert f"rank {rank} has {wanted}" in one.output, one.output
    places = []
    for job in (one, two):
        found = re.findall(r"in epoch 0 (\d+) (\S+)", job.output)
        assert len(set(found)) == 1 and found[0][0] != "29500", job.output
        places.append(found[0])
        assert "its process was killed by SIGKILL" in job.output
    assert places[0][0] != places[1][0] and places[0][1] != places[1][1]


def test_an_exception_ends_the_job_within_ten_seconds_with_its_traceback_once(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    script = TRAIN.replace(
        "training.wait()",
        """
    if rank == 1:
        print("raising", flush=True)
        {}["the user's mistake"]
    time.sleep(100)
    """,
    )
    with launch_job(tmp_path, script) as job:
        job.wait_for("raising")
        limit, start = stretched(10), time.monotonic()
        assert job.wait(within_seconds=limit) == 1
        assert time.monotonic() - start < limit
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "(rank 1)" in job.output and 'KeyError: "the user\'s mistake"' in job.output
    assert f'File "{tmp_path / "train.py"}", line' in job.output


# SIGTERM to one of two launchers is tried below.
@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.sweep), "Ctrl-C", "SIGKILL"])
def test_signals_to_the_launcher_end_the_job_within_ten_seconds(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path, how: str
) -> None:
    with launch_job(tmp_path, TRAIN) as job:
        job.wait_for("in epoch 0", times=2)
        tree = psutil.Process(job.process.pid).children(recursive=True)
        assert len(tree) >= 4
        limit, start = stretched(10), time.monotonic()
        if how == "Ctrl-C":
            os.killpg(job.process.pid, signal.SIGINT)
        else:
            job.process.send_signal(getattr(signal, how))
        assert job.wait(within_seconds=limit) != 0
        _, left = psutil.wait_procs(tree, timeout=max(0.0, start + limit - time.monotonic()))
        assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert "lost" not in job.output, job.output
    assert "Traceback" not in job.output, job.output
    why = f"the launcher (process {job.process.pid}) is gone" if how == "SIGKILL" else "was sent to the agent of rank"
    assert job.output.count("the job ends: ") == 1 and why in job.output, job.output


def test_sigterm_to_the_deepspeed_command_leaves_no_orphans(tmp_path: Path) -> None:
    """Stock: it ends alone, its launcher and workers run on."""
    with LaunchedJob(tmp_path, TRAIN, command=True) as job:
        job.wait_for("in epoch 0", times=2)
        tree = psutil.Process(job.process.pid).children(recursive=True)
        assert len(tree) >= 5
        limit = stretched(10)
        job.process.terminate()
        _, left = psutil.wait_procs(tree, timeout=limit)
        assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
        assert job.wait(within_seconds=limit) != 0


def test_a_killed_agent_of_rank_0_takes_its_coordinator_along_and_the_job_ends(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    with launch_job(tmp_path, TRAIN, slots=3) as job:
        job.wait_for("in epoch 0", times=3)
        tree = psutil.Process(job.process.pid).children(recursive=True)
        limit = stretched(10)
        os.kill(job.slot(0), signal.SIGKILL)
        assert job.wait(within_seconds=limit) != 0
        assert [process for process in tree if alive(process.pid)] == []
    assert job.output.count("rank 0, which ran the job's etcd, was killed") == 1, job.output


def test_without_the_section_the_script_runs_as_ever(tmp_path: Path) -> None:
    script = """
        own = [name for name in os.environ if name.startswith("BAMBOO_") and name != "BAMBOO_TEST_SESSION"]
        parent = open(f"/proc/{os.getppid()}/cmdline").read().split(chr(0))
        print("plain", rank, sys.argv[1], own, __name__, sys.path[0], "deepspeed.launcher.launch" in parent)
        sys.exit(5 if rank == 1 else 0)
    """
    with LaunchedJob(tmp_path, script, config={"train_batch_size": 4}) as job:
        assert job.wait(within_seconds=120) == 5, job.output
    assert f"plain 1 --local_rank=1 [] __main__ {tmp_path} True" in job.output, job.output


def two_machines(launch_job: Callable[..., LaunchedJob], folder: Path, script: str) -> tuple[LaunchedJob, LaunchedJob]:
    """Two launchers of one job, as on two machines with one slot each."""
    port = free_port("")
    one, two = (
        launch_job(
            folder / str(number),
            script,
            slots=1,
            nodes=2,
            node_rank=number,
            master_port=port,
            environment={"BAMBOO_NODE": f"node{number}"},
        )
        for number in (0, 1)
    )
    return one, two


def test_a_launcher_killed_on_one_of_two_machines_is_the_loss_of_that_machine(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    script = TRAIN.replace(
        "training.wait()",
        """
    while training.job.epoch().number < 1:
        time.sleep(0.01)
    print("goes on because", training.job.epoch().reason, flush=True)
    training.job.finish({})
    training.wait()
    """,
    )
    one, two = two_machines(launch_job, tmp_path, script)
    with one, two:
        one.wait_for("in epoch 0")
        two.wait_for("in epoch 0")
        limit = stretched(10)
        tree = psutil.Process(two.process.pid).children(recursive=True)
        two.process.kill()
        assert one.wait(within_seconds=limit) == 0, one.output
        _, left = psutil.wait_procs(tree, timeout=limit)
        assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert "goes on because node1-1-0: its process was killed by SIGKILL" in one.output, one.output


def test_a_signal_to_one_of_two_launchers_ends_the_job_on_both_machines(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    one, two = two_machines(launch_job, tmp_path, TRAIN)
    with one, two:
        one.wait_for("in epoch 0")
        two.wait_for("in epoch 0")
        limit = stretched(10)
        two.process.terminate()
        assert one.wait(within_seconds=limit) != 0 and two.wait(within_seconds=limit) != 0
    assert "SIGTERM was sent to the agent of rank 1 on node1" in one.output, one.output
