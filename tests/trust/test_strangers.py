"""Another user of the machine, and another machine, can do nothing to a job: a test for everything that listens."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed_bamboo.testing.fork_server import ForkServer
from tests.runtime.jobs import JobResult, Jobs, jobs_in
from tests.runtime.scenarios import Training
from tests.trust.namespaces import enter_network, networks
from tests.trust.visits import GREETING_BYTES, NOBODY, answers, as_somebody, train_with_visitors

SECRET = "of these tests"
WORLD = 2

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@dataclass
class Visit:
    """A job that waits for its visitors to leave: its processes, and where they listen."""

    folder: Path
    etcd: int
    workers: list[int]

    @property
    def listeners(self) -> list[tuple[int, str, int]]:
        """Process, address and port of each TCP socket that listens."""
        found = []
        for pid in (*self.workers, self.etcd):
            connections = psutil.Process(pid).net_connections(kind="tcp")
            found += [(pid, c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
        return found


@contextmanager
def visited(jobs: Jobs) -> Iterator[tuple[Visit, list[JobResult]]]:
    """A job in its pause; when the block ends it goes on, and its result is in the list."""
    results: list[JobResult] = []
    training = Training("visited", stages=WORLD, steps=3, faults=[])
    before = set(jobs.directory.glob("job*"))
    thread = threading.Thread(
        target=lambda: results.append(jobs.run(train_with_visitors, world=WORLD, training=training)), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 100
    notes: list[Path] = []
    while len(notes) < WORLD:
        assert time.monotonic() < deadline and (thread.is_alive() or notes), "the job did not come to its pause"
        new = set(jobs.directory.glob("job*")) - before
        notes = [note for folder in new for note in folder.glob("here*") if note.read_text(encoding="utf-8")]
        time.sleep(0.02)
    folder = notes[0].parent
    try:
        yield Visit(folder, jobs.etcd_pid, [int(note.read_text(encoding="utf-8")) for note in notes]), results
    finally:
        (folder / "gone").touch()
        thread.join(100)
        assert not thread.is_alive(), "the job did not end"


@pytest.fixture(scope="module")
def jobs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with jobs_in(tmp_path_factory.mktemp("jobs"), fork_server) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> Any:
    with visited(jobs) as (_, results):
        pass
    return results[0].common("digest")


def check_undisturbed(results: list[JobResult], digest: str) -> None:
    """The job went on with all its workers, to the same bits."""
    (result,) = results
    assert result.codes == [0] * WORLD, result.transcript()
    assert result.common("digest") == digest and result.common("epoch") == 0


def test_a_job_of_one_machine_listens_on_loopback_only_and_at_few_places(jobs: Jobs, undisturbed: str) -> None:
    with visited(jobs) as (visit, results):
        listeners = visit.listeners
        assert {address for _, address, _ in listeners} <= {"127.0.0.1", "::1"}, listeners
        count = Counter(pid for pid, _, _ in listeners)
        # A store, gloo, and what gloo's groups of the start leave behind.
        assert len({count[pid] for pid in visit.workers}) == 1 and max(count.values()) <= 8, count
        assert count[visit.etcd] == 0, "etcd listens on Unix sockets only"
    check_undisturbed(results, undisturbed)


@needs_root
def test_another_user_gets_nothing_from_any_listener_and_changes_nothing(jobs: Jobs, undisturbed: str) -> None:
    with visited(jobs) as (visit, results):
        listeners = [(address, port) for _, address, port in visit.listeners]
        heard = ast.literal_eval(as_somebody(NOBODY, lambda: answers(listeners)))
        assert {place for place, _ in heard} == set(listeners)
        assert [one for one in heard if len(one[1]) > GREETING_BYTES or SECRET.encode() in one[1]] == []
    check_undisturbed(results, undisturbed)


@needs_root
def test_another_user_can_reach_neither_etcd_nor_secrets(jobs: Jobs, undisturbed: str) -> None:
    def attempts(visit: Visit, path: Path) -> str:
        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))

        tries = {
            "etcd": connect,
            "folder": lambda: list(path.parent.iterdir()),
            "environment": lambda: Path(f"/proc/{visit.workers[0]}/environ").read_bytes(),
            "memory": lambda: os.close(os.open(f"/proc/{visit.workers[0]}/mem", os.O_RDONLY)),
            "signal": lambda: os.kill(visit.workers[0], 15),
        }
        done = []
        for name, attempt in tries.items():
            try:
                attempt()
                done.append(name)
            except (PermissionError, FileNotFoundError):
                continue
        return ",".join(done)

    with visited(jobs) as (visit, results):
        path = Path(jobs.etcd_socket)
        assert path.is_socket()
        assert as_somebody(NOBODY, lambda: attempts(visit, path)) == ""
        command_lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
        assert not [line for line in command_lines if SECRET in " ".join(line)], "the secret is in a process list"
    check_undisturbed(results, undisturbed)


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is needed for network namespaces")
@needs_root
def test_another_machine_finds_nothing_of_a_job_of_one_machine(jobs: Jobs, undisturbed: str) -> None:
    with networks(1, subnet="10.83.7", reaches_here=True) as (namespace,), visited(jobs) as (visit, results):
        ports = [port for _, _, port in visit.listeners]

        def reachable() -> list[int]:
            found = []
            for port in ports:
                with socket.socket() as probe:
                    probe.settimeout(1.0)
                    if any(_connects(probe, address, port) for address in ("10.83.7.254", "127.0.0.1")):
                        found.append(port)
            return found

        assert as_somebody(0, reachable, enter=lambda: enter_network(namespace)) == "[]"
    check_undisturbed(results, undisturbed)


def _connects(probe: socket.socket, address: str, port: int) -> bool:
    return probe.connect_ex((address, port)) == 0
