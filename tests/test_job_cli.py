"""ds_bamboo status, drain and stop on jobs in a real etcd."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.job_view import look
from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.status_screen import screen
from deepspeed_bamboo.cli.status_words import ended_line
from deepspeed_bamboo.coordination.ended import ended_folder, note_end
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.published import PublishedJob, own_pid_namespace, publish, published_jobs
from deepspeed_bamboo.coordination.records import AgentRecord, EndedJob, JobFailure
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.runtime.job.status import StatusTeller
from tests.coordination.helpers import first_epoch, freeze, member

WORKERS = ["a-0-0", "a-1-0", "b-2-0", "c-3-0"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateEtcd]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with PrivateEtcd() as etcd:
        yield etcd


@pytest.fixture
def job(server: PrivateEtcd) -> Iterator[JobCoordinator]:
    """A job of four workers, the last one a standby, to which a fifth has come."""
    store = EtcdStore([server.endpoint])
    coordinator = JobCoordinator(store, job="busy")
    coordinator.record_start(slots=4)
    registrations = []
    for rank, worker in enumerate([*WORKERS, "d-4-0"]):
        registrations.append(coordinator.register_agent(AgentRecord(rank, worker[0], 1), lease_seconds=60))
        entered = replace(member(worker, rank=rank), node=worker[0], zone=f"z{rank}", joining=rank == 4)
        registrations.append(coordinator.register(entered, lease_seconds=60))
    coordinator.propose(first_epoch(WORKERS, stages=3), expected=None)
    yield coordinator
    for registration in registrations:
        registration.withdraw()
    store.close()


def test_status_shows_who_hosts_what(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    job.request_drain("b", deadline_seconds=90.0, reason="EC2 takes it")
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("job busy: running, started ") and lines[0].endswith("s ago, 5 agents")
    assert lines[1].startswith("epoch 0, since ") and lines[1].endswith("start")
    assert lines[2] == "node b is being left, 90 s after the request: EC2 takes it"
    own = str(os.getpid())
    assert [line.split() for line in lines[4:6]] == [["stage", "0", "1", "2"], ["pipeline", "0", "1/3", "2/1", "3/2"]]
    assert [line.split() for line in lines[8:]] == [
        ["#", "worker", "node", "zone", "state", "hosts", "(pipeline.stage)", "shadows", "address", "pid", "agent's"],
        ["1", "a-0-0", "a", "z0", "active", "0.0", "0.1", "127.0.0.1", own, "1"],
        ["2", "a-1-0", "a", "z1", "active", "0.1", "0.2", "127.0.0.1", own, "1"],
        ["3", "b-2-0", "b", "z2", "leaving", "0.2", "0.0", "127.0.0.1", own, "1"],
        ["4", "c-3-0", "c", "z3", "standby", "-", "-", "127.0.0.1", own, "1"],
        ["5", "d-4-0", "d", "z4", "joining", "-", "-", "127.0.0.1", own, "1"],
    ]


def test_status_shows_who_stands_still_and_where(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"rank": 1, "node": "a", "doing": "FNC 0.1 2", "step": 7, "seconds": 64.2, "waiting": False}
    job.publish_hang("a-1-0", {**facts, "stack": '  File "train.py", line 7 in hook'})
    job.publish_hang("gone", {**facts, "stack": ""})
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("worker a-1-0 (rank 1 on a) has stood still for 64 s in step 7, in FNC 0.1 2; its main")
    assert lines[3] == '  File "train.py", line 7 in hook'
    assert not [line for line in lines if "gone" in line]
    job.publish_hang("a-1-0", None)
    assert look(job).hangs == {}


def test_status_shows_slots_whose_worker_is_still_getting_ready(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    registration = job.register_agent(AgentRecord(7, "e", 1), lease_seconds=60)
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        *["-", "(slot", "7)", "e", "?", "preparing", "-", "-", "?", "-", "1"]
    ]
    registration.withdraw()


def test_status_shows_the_step_and_recent_events(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[object] = []
    watch = job.watch(told.append)
    teller = StatusTeller(job, worker="a-0-0")
    pause = {"workers": ["b-2-0"], "lost": ["0.2"], "pause_seconds": {"total": 0.25}}
    teller.note("loss_of_node", step=6, reporter=True, fields=pause)
    teller.note("step", step=6, reporter=False, fields={"loss": 1.0, "seconds": 0.1})
    assert job.status() is None, "only the reporter tells"
    teller.note("step", step=7, reporter=True, fields={"loss": 2.5, "seconds": 0.125})
    await_status(job, step=7)
    teller.close()
    other = StatusTeller(job, worker="c-3-0")
    other.note("reconfigured", step=9, reporter=True, fields={"reason": "joined: d-4-0", "seconds": 0.5})
    for step, action in ((7, "taken"), (8, "saved"), (10, "taken"), (11, "saved")):
        other.note("checkpoint", step=step, reporter=True, fields={"action": action, "path": f"kept/bamboo_step{step}"})
    other.note("step", step=9, reporter=True, fields={"loss": 2.25, "seconds": 0.125})
    await_status(job, step=9)
    other.close()
    watch.stop()
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 9, loss 2.2500, 0.125 s a step, \d+ s ago", lines[2])
    assert [line.split(" ago  ")[1] for line in lines[-3:]] == [
        "step 6: lost b-2-0 with 0.2, pause 0.25 s",
        "step 9: joined: d-4-0, pause 0.50 s",
        "step 11: checkpoint saved kept/bamboo_step11",
    ]
    assert not [change for change in told if "status" in str(change)], "watchers of the job hear of no step"
    job.clean_up()
    assert job.status() is None


def await_status(job: JobCoordinator, *, step: int) -> None:
    deadline = time.monotonic() + 20.0
    while (job.status() or {}).get("step") != step:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("age_seconds", "step_seconds", "still"), [(29, 0.1, False), (40, 0.1, True), (40, 9.0, False)]
)
def test_status_says_when_nothing_moves(
    job: JobCoordinator,
    server: PrivateEtcd,
    capsys: pytest.CaptureFixture[str],
    age_seconds: float,
    step_seconds: float,
    still: bool,
) -> None:
    told = {"worker": "a-0-0", "t": time.time() - age_seconds, "step": 7, "loss": 2.5, "seconds": step_seconds}
    job.publish_status({**told, "events": []})
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint)]) == 0
    assert ("no step has ended since" in capsys.readouterr().out) is still


def test_status_as_json(job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]) -> None:
    job.withdraw("a-1-0")
    assert main(["status", "--job", "busy", "--endpoints", str(server.endpoint), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["state"], seen["epoch"], seen["agents"]) == ("running", 0, 5)
    states = [worker["state"] for worker in seen["workers"]]
    assert states == ["active", "silent", "active", "standby", "joining", "preparing"]
    assert seen["workers"][-1]["worker"] == "(slot 1)", "its agent starts another one"
    assert seen["workers"][0]["hosts"] == ["0.0"]


@pytest.mark.parametrize("how", ["finished", "failed", "stopping"])
def test_status_says_how_it_ended(job: JobCoordinator, how: str) -> None:
    if how == "finished":
        job.finish({})
    elif how == "failed":
        job.fail(JobFailure(worker="a-0-0", kind="user_error", message="boom", traceback=""))
    else:
        job.request_stop("enough")
    view = look(job)
    assert view.state == how and view.over is (how != "stopping")
    assert view.detail == {"finished": "", "failed": "boom", "stopping": "enough"}[how]


def test_status_after_the_end_knows_the_last_step_and_that_the_job_was_stopped(job: JobCoordinator) -> None:
    job.publish_status({"worker": "a-0-0", "t": time.time(), "step": 37, "loss": 1.0})
    job.finish({"step": 40})
    assert (look(job).progress or {})["step"] == 39 and "loss" not in (look(job).progress or {})
    end = job.end()
    assert end is not None and "job busy: finished after step 39," in ended_line(end)
    job.request_stop("enough")
    assert look(job).detail == "stopped: enough"
    end = job.end()
    assert end is not None and re.fullmatch(r"job busy: stopped after step 39, \d+ s ago \(enough\)", ended_line(end))


def test_workers_that_are_gone_when_all_is_finished_are_done(job: JobCoordinator) -> None:
    job.withdraw("a-1-0")
    assert "silent" in [worker.state for worker in look(job).workers]
    job.finish({})
    assert [worker.state for worker in look(job).workers if worker.worker == "a-1-0"] == ["done"]


def test_watching_ends_with_the_job_and_leaves_nothing_in_its_place(server: PrivateEtcd, job: JobCoordinator) -> None:
    command = [sys.executable, "-m", "deepspeed_bamboo.cli.main", "status", "--job", "busy", "--watch", "--json"]
    with subprocess.Popen(
        [*command, "--endpoints", str(server.endpoint)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "running"
        job.clean_up()
        states = [json.loads(line)["state"] for line in process.stdout]
        assert process.wait() == 0 and states[-1] == "dead"
    assert job.peek_epoch() is None


def test_drain_and_stop_ask_the_job(
    job: JobCoordinator, server: PrivateEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "ds.json"
    settings.write_text(json.dumps({"bamboo": {"coordinator": {"endpoints": [str(server.endpoint)]}}}))
    where = ["--job", "busy", "--deepspeed_config", str(settings)]
    assert main(["drain", "b", *where, "--deadline-seconds", "45"]) == 0
    assert job.draining()["b"].deadline_seconds == 45.0
    assert main(["drain", "bb", *where, "--cancel"]) == 1
    assert "node 'bb' of job 'busy' is not to be left; those that are: b" in capsys.readouterr().err
    assert list(job.draining()) == ["b"]
    assert main(["drain", "b", *where, "--cancel"]) == 0
    assert job.draining() == {}
    assert main(["drain", "b", *where, "--cancel"]) == 1
    assert "is not to be left; none is" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["drain", "b", *where, "--cancel", "--deadline-seconds", "45"])
    assert "not allowed with argument" in capsys.readouterr().err
    assert main(["drain", "x", *where]) == 1
    assert "no node 'x' takes part in job 'busy'; its nodes are a, b, c, d" in capsys.readouterr().err
    assert main(["stop", *where]) == 0
    assert job.stop_requested() == "ds_bamboo stop"
    assert "next iteration boundary. A script that looks at engine.finished" in capsys.readouterr().out


def test_a_drain_of_the_last_node_says_that_there_is_none_to_move_to(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--job", "busy", "--endpoints", str(server.endpoint)]
    for node in "abc":
        assert main(["drain", node, *where]) == 0
        assert "will be left at the next iteration boundary" in capsys.readouterr().out
    assert main(["drain", "d", *where]) == 0
    assert "node d is to be left, but the job has no other node to move to" in capsys.readouterr().out


def test_a_job_that_nobody_runs_can_not_be_asked_for_anything(
    server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machines are gone. The next one that comes begins it anew, and reads no request of before."""
    with contextlib.closing(EtcdStore([server.endpoint])) as store:
        dead = JobCoordinator(store, job="dead")
        dead.propose(first_epoch(WORKERS, stages=3), expected=None)
        where = ["--job", "dead", "--endpoints", str(server.endpoint)]
        for command in (["stop"], ["drain", "a"]):
            assert main([*command, *where]) == 1
            said = capsys.readouterr()
            assert "nobody runs job 'dead' now" in said.err and "ds_bamboo fleet down" in said.err and not said.out
        assert dead.stop_requested() is None and dead.draining() == {}
        dead.clean_up()


def test_a_loss_that_is_no_number_is_null_in_json(job: JobCoordinator, server: PrivateEtcd) -> None:
    job.publish_status({"worker": "a-0-0", "t": time.time(), "step": 3, "loss": math.nan, "seconds": math.inf})
    found = look(job).to_json()
    json.dumps(found, allow_nan=False)
    assert (found["progress"]["loss"], found["progress"]["seconds"], found["progress"]["step"]) == (None, None, 3)


def test_the_node_with_the_jobs_own_etcd_is_not_drained_as_if_the_job_continued(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = job.register_agent(AgentRecord(0, "a", 1, keeps_etcd=True), lease_seconds=60)
    where = ["--job", "busy", "--endpoints", str(server.endpoint)]
    assert main(["drain", "a", *where]) == 1
    assert "node a has the job's own etcd, and the job ends with it" in capsys.readouterr().err
    assert job.draining() == {}
    assert main(["drain", "a", *where, "--deadline-seconds", "45"]) == 0
    assert main(["drain", "b", *where]) == 0
    assert sorted(job.draining()) == ["a", "b"]
    keeper.withdraw()


def test_a_job_that_starts_says_which_slots_it_waits_for_and_ends_at_once(
    server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(EtcdStore([server.endpoint])) as store:
        starting = JobCoordinator(store, job="young")
        starting.record_start(slots=4)
        agents = [starting.register_agent(AgentRecord(rank, "a", 1), lease_seconds=60) for rank in (0, 1)]
        where = ["--job", "young", "--endpoints", str(server.endpoint)]
        assert main(["status", *where]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("job young: starting, ") and lines[0].endswith(", 2 agents")
        assert lines[1] == "waiting for 2 of 4 slots to begin: 2, 3"
        assert look(starting).to_json()["missing_slots"] == (2, 3)
        assert main(["stop", *where]) == 0
        assert "has not started to train, so it ends now (with exit code 1)" in capsys.readouterr().out
        for agent in agents:
            agent.withdraw()
        starting.clean_up()


def test_what_two_reporters_have_noted_is_shown_once(job: JobCoordinator) -> None:
    first, second = StatusTeller(job, worker="a-0-0"), StatusTeller(job, worker="a-1-0")
    for step, reason in ((1, "neighbours further apart"), (4, "joined: d-4-0")):
        for teller in (first, second):  # not at the same time
            teller.note("reconfigured", step=step, reporter=False, fields={"reason": reason, "seconds": 0.1})
    first.note("loss_of_node", step=5, reporter=True, fields={"workers": ["b-2-0"]})
    first.note("step", step=5, reporter=True, fields={"loss": 1.0, "seconds": 0.1})
    await_status(job, step=5)
    first.close()
    second.note("loss_of_node", step=5, reporter=True, fields={"workers": ["c-3-0"]})
    second.note("step", step=6, reporter=True, fields={"loss": 1.0, "seconds": 0.1})
    await_status(job, step=6)
    second.close()
    told = [(event["step"], event.get("reason", event.get("workers"))) for event in (job.status() or {})["events"]]
    assert told == [(1, "neighbours further apart"), (4, "joined: d-4-0"), (5, ["b-2-0"]), (5, ["c-3-0"])]


class Terminal(io.StringIO):
    """Somebody at a keyboard who has typed this."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", [["stop"], ["drain", "b"]])
def test_the_only_job_is_not_ended_or_drained_unasked(
    job: JobCoordinator,
    server: PrivateEtcd,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--endpoints", str(server.endpoint)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main([*command, *where]) == 1
    assert "job busy, which the command does not name; give --job NAME, or --yes" in capsys.readouterr().err
    for answer, code in (("\n", 1), ("no\n", 1), ("y\n", 0)):
        assert job.stop_requested() is None and job.draining() == {}
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert main([*command, *where]) == code
        assert "job busy? [y/N]" in capsys.readouterr().out


def test_status_says_how_a_job_has_ended_that_is_there_no_more(
    job: JobCoordinator, server: PrivateEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.publish_status({"worker": "a-0-0", "t": time.time(), "step": 41})
    job.fail(JobFailure(worker="a-0-0", kind="fatal_loss", message="no live worker holds 0.2", traceback=""))
    end = job.end()
    for rank in range(5):
        job._store.delete(job._keys.agent(rank))
    for worker in job.members():
        job.withdraw(worker)
    job.clean_up()
    where = ["--endpoints", str(server.endpoint)]
    assert main(["status", "--job", "busy", *where]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"job busy: failed in step 41, \d+ s ago \(no live worker holds 0.2\)\n", told), told
    assert main(["status", "--job", "busy", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    assert main(["stop", "--job", "busy", *where]) == 1 and main(["status", *where]) == 1
    capsys.readouterr()

    assert end is not None and main(["status"]) == 1
    note_end(end, ended_folder(os.environ))
    note_end(replace(end, job="older", time_seconds=time.time() - 100_000), ended_folder(os.environ))
    for command in (["status"], ["status", "--job", "busy"]):
        assert main(command) == 0
    assert capsys.readouterr().out.count("job busy: failed in step 41") == 2
    assert main(["status", "--job", "older"]) == 1
    with job.claim_name(lease_seconds=10):
        assert job.last_end() is None, "another one has been started"


def test_a_file_without_the_section_shows_nobody_elses_job(
    job: JobCoordinator, server: PrivateEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(
        server.directory,
        PublishedJob("busy", "/deepspeed_bamboo", str(server.endpoint), os.getpid(), own_pid_namespace()),
    )
    file = tmp_path / "ds.json"
    for settings in ({"train_batch_size": 4}, {"bamboo": {"enabled": False}}):
        file.write_text(json.dumps(settings))
        assert main(["status", "--deepspeed_config", str(file)]) == 1
        assert 'has no "bamboo" section that is on' in capsys.readouterr().err


def test_status_shows_the_last_good_checkpoint_and_whether_the_next_is_overdue(job: JobCoordinator) -> None:
    now = time.time()
    saved = {"t": now - 1300, "event": "checkpoint", "action": "saved", "step": 30, "path": "kept/30"}
    failed = {"t": now - 60, "event": "checkpoint", "action": "failed", "step": 60, "reason": "disk full"}
    job.publish_status({"worker": "a-0-0", "t": now, "step": 70})
    job.publish_events([saved, failed])
    assert "last checkpoint: step 30, 21 min 40 s ago" in screen(look(job))
    job.publish_events([{**saved, "interval_seconds": 600.0}, failed])
    overdue = "last checkpoint: step 30, 21 min 40 s ago; the next one is overdue, they are due every 10 min 0 s"
    assert overdue in screen(look(job))


def test_a_checkpoint_that_failed_does_not_hide_the_last_good_one() -> None:
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    teller = StatusTeller(job, worker="w0")
    for step, action in ((1, "saved"), (2, "saved"), (3, "failed"), (4, "failed")):
        teller.note("checkpoint", step=step, reporter=True, fields={"action": action, "path": "p", "reason": "r"})
    teller.note("step", step=5, reporter=True, fields={"loss": 1.0, "seconds": 0.1})
    await_status(job, step=5)
    assert [event["step"] for event in (job.status() or {})["events"]] == [2, 4]
    teller.close()
    store.close()


def test_the_last_checkpoint_is_shown_however_much_has_happened_since(job: JobCoordinator) -> None:
    teller = StatusTeller(job, worker="a-0-0")
    saved = {"action": "saved", "path": "p", "last_step": 1, "interval_seconds": 1e-9}
    teller.note("checkpoint", step=2, reporter=True, fields=saved)
    for step in range(3, 20):
        teller.note("reconfigured", step=step, reporter=True, fields={"reason": f"joined: w{step}", "seconds": 0.1})
    teller.note("step", step=20, reporter=True, fields={"loss": 1.0, "seconds": 0.1})
    await_status(job, step=20)
    teller.close()
    found = look(job)
    assert found.checkpoint is not None and (found.checkpoint.step, found.checkpoint.overdue) == (1, True)
    assert [event["step"] for event in found.events] == [2, *range(12, 20)]


def test_watching_outlives_an_outage_of_an_external_etcd(job: JobCoordinator, server: PrivateEtcd) -> None:
    command = [sys.executable, "-m", "deepspeed_bamboo.cli.main", "status", "--job", "busy", "--watch", "--json"]
    with subprocess.Popen(
        [*command, "--endpoints", str(server.endpoint)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "running"
        freeze(server.pid)
        while "unavailable" not in json.loads(process.stdout.readline()):
            pass
        os.kill(server.pid, signal.SIGCONT)
        while json.loads(process.stdout.readline()).get("state") != "running":
            pass
        process.kill()


def test_a_wrong_password_is_called_that(tmp_path: Path) -> None:
    told = [
        CoordinatorUnavailable(endpoints=["e:1"], tried_seconds=0.1, reason=f"INVALID_ARGUMENT: etcdserver: {reason}")
        for reason in ("authentication failed, invalid user ID or password", "user name is empty")
    ]
    assert all("refuses this user" in str(error) and "no answer" not in str(error) for error in told)


def test_an_etcd_with_users_asks_for_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: object, **kwargs: object) -> object:
        raise CoordinatorUnavailable(endpoints=["h:1"], tried_seconds=5.0, reason="etcdserver: user name is empty")

    monkeypatch.setattr("deepspeed_bamboo.elastic.running_job.open_store", refused)
    assert main(["status", "--endpoints", "h:1", "--job", "j"]) == 1
    told = capsys.readouterr().err
    assert "user name is empty" in told and "give --deepspeed_config FILE instead" in told
    assert "coordinator.username" not in told  # there is none on this command line


def test_a_job_that_is_not_there_is_named_with_those_that_are(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--job", "bussy", "--endpoints", str(server.endpoint)]) == 1
    assert f"no job 'bussy' at {server.endpoint} under /deepspeed_bamboo; running are busy" in capsys.readouterr().err
    assert main(["stop", "--job", "busy"]) == 1
    assert "no job 'busy' of yours" in capsys.readouterr().err


def test_the_only_job_needs_no_name(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--endpoints", str(server.endpoint)]
    assert main(["drain", "b", "--yes", *where]) == 0
    assert "job busy: node b will be left" in capsys.readouterr().out
    assert main(["status"]) == 1
    assert "no job of yours with an etcd of its own on this machine. For a job that" in capsys.readouterr().err
    about = PublishedJob("busy", "/deepspeed_bamboo", str(server.endpoint), os.getpid(), own_pid_namespace())
    publish(server.directory, about)
    assert main(["status"]) == 0
    assert "job busy: running" in capsys.readouterr().out

    store = EtcdStore([server.endpoint])
    another = JobCoordinator(store, job="other").register_agent(AgentRecord(0, "a", 1), lease_seconds=60)
    publish(server.directory, replace(about, job="other"))
    assert main(["stop"]) == 1 and main(["stop", *where]) == 1
    assert capsys.readouterr().err.count("busy, other; name one with --job NAME") == 2
    assert job.stop_requested() is None
    another.withdraw()
    store.close()


def test_a_private_job_is_found_on_its_machine(
    job: JobCoordinator, server: PrivateEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    about = PublishedJob("busy", "/deepspeed_bamboo", str(server.endpoint), os.getpid(), own_pid_namespace())
    publish(server.directory, about)
    assert published_jobs() == published_jobs("busy") == [about] and about.same_namespace
    assert main(["status", "--job", "busy"]) == 0
    assert "job busy: running" in capsys.readouterr().out
    assert main(["status", "--job", "other"]) == 1
    assert "running are busy" in capsys.readouterr().err
    server.directory.chmod(0o755)
    assert published_jobs() == [], "others could have written there"
    server.directory.chmod(0o700)


def test_status_lists_several_jobs_and_shows_none_that_ended_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    note_end(EndedJob("old", "finished", "", 7, time.time()), ended_folder(os.environ))
    there = [PublishedJob(name, "bamboo", "127.0.0.1:9", 1, "", "", "") for name in ("a", "b")]
    monkeypatch.setattr("deepspeed_bamboo.coordination.published.published_jobs", lambda *_: there)
    assert main(["status"]) == 1
    assert "several jobs run of yours" in capsys.readouterr().err
    monkeypatch.setattr("deepspeed_bamboo.coordination.published.published_jobs", lambda *_: there[:1])
    monkeypatch.setattr("deepspeed_bamboo.cli.job._CONNECT_SECONDS", 0.1)
    assert main(["status"]) == 1
    assert "the job 'a' on this machine is just starting or ending" in capsys.readouterr().err
    monkeypatch.setattr("deepspeed_bamboo.coordination.published.published_jobs", lambda *_: [])
    assert main(["status"]) == 0
    assert "job old: finished after step 7" in capsys.readouterr().out
