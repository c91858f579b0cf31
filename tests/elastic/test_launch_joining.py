"""Commands that join a running job under DeepSpeed's real launcher, and slots that stand by."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed_bamboo.coordination.published import published_jobs
from deepspeed_bamboo.coordination.server import PrivateEtcd
from tests.coordination.helpers import wait_until
from tests.elastic.launched import LaunchedJob

TRAIN = """
    import time
    training = FakeTraining()
    print("joining" if training.joining else "starting", training.worker, os.environ["BAMBOO_ENDPOINTS"], flush=True)
    training.begin()
    print("in an epoch", flush=True)
    if training.rank == 0:
        wanted = int(sys.argv[-1])
        while training.job.epoch() is None or len(training.job.epoch().members) < wanted:
            training.take_in(within_seconds=0.5)
        while not os.path.exists(os.environ.get("TEST_MAY_END", "/")):
            time.sleep(0.01)
        print("all", sorted(m.rank for m in training.job.members().values()), flush=True)
        training.job.finish({})
    sys.exit(training.come_and_go())
"""
ONE_MORE = ("--job", "grows")


def config(**coordinator: Any) -> Mapping[str, object]:
    return {"bamboo": {"topology": {"max_restarts": 0}, "coordinator": coordinator}}


@pytest.mark.parametrize("external", [False, True])
def test_the_same_command_again_joins_the_running_job(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path, external: bool
) -> None:
    server = PrivateEtcd() if external else None
    settings = config(endpoints=[str(server.endpoint)]) if server else config()
    more: dict[str, Any] = {"options": ONE_MORE, "config": settings, "arguments": ("5",)}
    may_end = tmp_path / "may_end"
    with launch_job(tmp_path / "a", TRAIN, **more, environment={"TEST_MAY_END": str(may_end)}) as first:
        first.wait_for("in an epoch", times=2)
        before = {process.pid for process in psutil.Process(first.process.pid).children(recursive=True)}
        if not external:
            (job,) = published_jobs("grows")
            (file,) = Path(tempfile.gettempdir()).glob("bamboo-etcd-*/job-grows")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600 and json.loads(file.read_text())["job"] == job.job
        with (
            launch_job(tmp_path / "b", TRAIN, **more) as second,
            launch_job(tmp_path / "c", TRAIN, slots=1, **more) as third,
        ):
            second.wait_for("joining", times=2)
            third.wait_for("joining")
            assert before <= {process.pid for process in psutil.Process(first.process.pid).children(recursive=True)}
            may_end.touch()
            assert second.wait(within_seconds=120) == 0, second.output
            assert third.wait(within_seconds=120) == 0, third.output
        assert first.wait(within_seconds=120) == 0, first.output
    found = re.search(r"all \[(.*)\]", first.output)
    assert found and found[1] == "0, 1, 2, 3, 4", first.output
    workers = re.findall(r"(?:joining|starting) (\S+)", first.output + second.output + third.output)
    assert len(set(workers)) == 5
    endpoints = re.findall(r"(?:joining|starting) \S+ (\S+)", first.output + second.output + third.output)
    assert len(endpoints) == 5 and len(set(endpoints)) == 1, endpoints
    if server:
        server.stop()
    assert published_jobs("grows") == []


def test_slots_beyond_the_wanted_workers_stand_by(launch_job: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    more: dict[str, Any] = {"options": ("--workers", "2"), "arguments": ("3",)}
    with launch_job(tmp_path, TRAIN, slots=3, **more) as job:
        assert job.wait(within_seconds=120) == 0, job.output
    assert job.output.count("starting") == 2 and job.output.count("joining") == 1, job.output
    assert "all [0, 1, 2]" in job.output, job.output


def test_a_job_that_is_just_starting_is_joined_by_those_who_only_want_to_join(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    script = """
        training = FakeTraining()
        print("joining" if training.joining else "starting", flush=True)
        while not training.joining and not os.path.exists(sys.argv[-1]):
            time.sleep(0.01)
        training.begin()
        print("in an epoch", flush=True)
        if training.rank == 0:
            while len(training.job.epoch().members) < 3:
                training.take_in(within_seconds=0.5)
            training.job.finish({})
        sys.exit(training.come_and_go())
    """
    may_begin = tmp_path / "may_begin"
    more: dict[str, Any] = {"arguments": (str(may_begin),)}
    with launch_job(tmp_path / "a", script, options=ONE_MORE, **more) as first:
        first.wait_for("starting", times=2)
        with (
            launch_job(tmp_path / "c", script, slots=1, options=ONE_MORE, **more) as refused,
            launch_job(tmp_path / "b", script, slots=1, options=(*ONE_MORE, "--join"), **more) as second,
        ):
            assert refused.wait(within_seconds=120) != 0
            assert "'grows' is just starting" in refused.output and "--job NAME" in refused.output, refused.output
            assert refused.output.count("cannot start") == 1, refused.output
            second.wait_for("this command joins it when it trains")
            assert "joining" not in second.output, second.output
            may_begin.touch()
            assert second.wait(within_seconds=120) == 0, second.output
        assert first.wait(within_seconds=120) == 0, first.output
    assert "joining" in second.output and second.output.count("when it trains") == 1, second.output


def test_of_two_commands_at_the_same_time_one_starts_the_job(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    script = """
        training = FakeTraining()
        print("registered", flush=True)
        training.wait()
    """
    more: dict[str, Any] = {"slots": 1, "options": ONE_MORE}
    with launch_job(tmp_path / "a", script, **more) as one, launch_job(tmp_path / "b", script, **more) as other:
        while one.process.poll() is None and other.process.poll() is None:
            time.sleep(0.05)
        refused, started = (one, other) if other.process.poll() is None else (other, one)
        assert refused.wait(within_seconds=60) != 0
        assert "'grows' is just starting" in refused.output, refused.output
        started.wait_for("registered")
        assert "job grows: 1 worker; redundancy lazy; its own etcd at unix:/" in started.output, started.output
        assert "ds_bamboo status --job grows" in started.output, started.output
        started.process.terminate()
        started.wait(within_seconds=60)


def test_who_only_wants_to_join_is_told_where_a_job_must_be(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    with launch_job(tmp_path / "a", TRAIN, options=(*ONE_MORE, "--join")) as job:
        assert job.wait(within_seconds=120) != 0
    assert "no job 'grows' with an etcd of its own runs on this machine" in job.output, job.output
    assert "set coordinator.endpoints" in job.output, job.output
    with PrivateEtcd() as server:
        settings = config(endpoints=[str(server.endpoint)])
        with launch_job(tmp_path / "b", TRAIN, options=(*ONE_MORE, "--join"), config=settings) as job:
            assert job.wait(within_seconds=120) != 0
        assert f"no job 'grows' runs at {server.endpoint}" in job.output, job.output


def test_more_workers_than_slots_is_an_error(launch_job: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    with launch_job(tmp_path, TRAIN, options=("--workers", "3")) as job:
        assert job.wait(within_seconds=120) != 0
    assert "--workers is 3, but this command has 2 slots" in job.output, job.output


@pytest.mark.sweep
def test_without_redundancy_nobody_is_left_waiting(launch_job: Callable[..., LaunchedJob], tmp_path: Path) -> None:
    off = {"bamboo": {"redundancy": {"mode": "off"}}}
    with launch_job(tmp_path / "a", TRAIN, options=("--workers", "1"), config=off) as job:
        assert job.wait(within_seconds=120) != 0
    assert "--workers is 1 of 2 slots" in job.output and 'redundancy.mode is "off"' in job.output, job.output
    with PrivateEtcd() as server:
        settings = {"bamboo": {**off["bamboo"], "coordinator": {"endpoints": [str(server.endpoint)]}}}
        with launch_job(tmp_path / "b", TRAIN, options=ONE_MORE, config=settings, arguments=("5",)) as first:
            first.wait_for("in an epoch", times=2)
            with launch_job(tmp_path / "c", TRAIN, options=ONE_MORE, config=settings) as second:
                assert second.wait(within_seconds=120) != 0
            assert "job 'grows' is already running" in second.output and "another --job" in second.output, second.output
            first.process.terminate()
            first.wait(within_seconds=60)


REPEATED = """
    from deepspeed_bamboo.coordination import JobFailure
    training = FakeTraining()
    print("joining" if training.joining else "starting", flush=True)
    while not training.joining and not os.path.exists(os.environ["TEST_MAY_BEGIN"]):
        time.sleep(0.01)
    training.begin()
    print("in an epoch", flush=True)
    lose, lost = os.environ.get("TEST_LOSE", "/"), os.environ.get("TEST_LOST", "/")
    if training.rank == 0 and not os.path.exists(lost):
        while not os.path.exists(lose):
            time.sleep(0.01)
        open(lost, "w").close()
        training.job.fail(JobFailure(training.worker, "fatal_loss", "too much was lost", ""))
    if training.rank == 0 and training.job.failure() is None:
        while len(training.job.epoch().members) < 3:
            training.take_in(within_seconds=0.5)
        training.job.finish({})
    sys.exit(training.come_and_go())
"""
RUN: Mapping[str, Any] = {"command": True, "run": ("--pause-seconds", "0.1"), "options": ONE_MORE}


def test_of_machines_that_come_at_the_same_moment_one_starts_the_job_and_all_get_into_it(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    """As those of a fleet: each runs the same ``ds_bamboo run``. Another comes when the job is complete."""
    may_begin = tmp_path / "may_begin"
    with PrivateEtcd() as server, contextlib.ExitStack() as opened:
        settings = config(endpoints=[str(server.endpoint)])
        environment = {"TEST_MAY_BEGIN": str(may_begin)}
        jobs = [
            opened.enter_context(
                launch_job(tmp_path / name, REPEATED, slots=1, config=settings, environment=environment, **RUN)
            )
            for name in "abc"
        ]
        wait_until(
            lambda: sorted("when it trains" in job.output or "starting\n" in job.output for job in jobs) == [True] * 3,
            within_seconds=120,
            what="one that starts the job, and two that wait for it",
        )
        assert ["joining" in job.output for job in jobs] == [False] * 3
        may_begin.touch()
        for job in jobs:
            assert job.wait(within_seconds=120) == 0, job.output
        together = "".join(job.output for job in jobs)
        assert (together.count("starting\n"), together.count("joining\n")) == (1, 2), together
        assert "give up" not in together, together
        environment |= {"BAMBOO_SINCE": "1", "BAMBOO_FLEET": "night"}
        with launch_job(tmp_path / "d", REPEATED, config=settings, environment=environment, **RUN) as late:
            assert late.wait(within_seconds=120) == 0, late.output
        assert "'grows' is complete since" in late.output and "fleet down night" in late.output, late.output
        assert "done, exit code 0: the job 'grows' is complete" in late.output, late.output
        assert "cannot start" not in late.output and "starting\n" not in late.output, late.output


def test_a_machine_that_comes_while_the_job_ends_for_want_of_machines_starts_it_again(
    launch_job: Callable[..., LaunchedJob], tmp_path: Path
) -> None:
    may_begin, lose, lost = (tmp_path / name for name in ("may_begin", "lose", "lost"))
    may_begin.touch()
    environment = {f"TEST_{path.name.upper()}": str(path) for path in (may_begin, lose, lost)}
    with PrivateEtcd() as server:
        more = {**RUN, "config": config(endpoints=[str(server.endpoint)], lease_seconds=30), "environment": environment}
        with launch_job(tmp_path / "a", REPEATED, **more) as first:
            first.wait_for("in an epoch", times=2)
            agent = first.slot(1)
            os.kill(agent, signal.SIGSTOP)
            lose.touch()
            first.wait_for("the job ends: too much was lost")
            with launch_job(tmp_path / "b", REPEATED, slots=1, **more) as second:
                second.wait_for("is about to end; this command waits until it has")
                os.kill(agent, signal.SIGCONT)
                assert second.wait(within_seconds=120) == 0, second.output
            assert first.wait(within_seconds=120) == 0, first.output
    assert "again in 0.1 s: too much was lost" in first.output, first.output
    assert "give up" not in first.output + second.output
    assert second.output.count("starting\n") + second.output.count("joining\n") == 1, second.output
