"""Children on request: they end with whoever asked for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_bamboo.elastic.cleaning_up import cleaning_up_when_told_to_end
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.testing.fork_server import ForkRequest, ForkServer, fork, reference
from deepspeed_bamboo.testing.harness import Machine
from tests.coordination.helpers import alive, stretched, wait_until
from tests.elastic import workers


def greet(name: str, number: int) -> int:
    print("hello", name, os.environ.get("GREETING"))
    return number


def fail() -> None:
    raise KeyError("in the child")


def leave() -> None:
    sys.exit(7)


def sleep() -> None:
    time.sleep(60)


def sleep_stubbornly() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def told_to_end_during_an_import() -> None:
    with cleaning_up_when_told_to_end():
        with contextlib.suppress(SystemExit):  # as a library may
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "output")


def test_a_child_gets_arguments_environment_and_output(fork_server: ForkServer, output: str) -> None:
    request = ForkRequest(reference(greet), ("you", 5), {"GREETING": "hi"}, output)
    assert fork_server.fork(request).exit_code(within_seconds=30) == 5
    assert Path(output).read_text().strip() == "hello you hi"
    assert "GREETING" not in os.environ


def test_who_is_told_to_end_does_so_even_if_a_library_swallows_it(fork_server: ForkServer, output: str) -> None:
    child = fork_server.fork(ForkRequest(reference(told_to_end_during_an_import), output=output))
    assert child.exit_code(within_seconds=30) == 143, Path(output).read_text()


def test_how_a_child_ends_is_told(fork_server: ForkServer, output: str) -> None:
    failing = fork_server.fork(ForkRequest(reference(fail), output=output))
    assert failing.exit_code(within_seconds=30) == 1
    assert "KeyError: 'in the child'" in Path(output).read_text()
    assert fork_server.fork(ForkRequest(reference(leave), output=output)).exit_code(within_seconds=30) == 7
    sleeping = fork_server.fork(ForkRequest(reference(sleep), output=output))
    assert sleeping.exit_code(within_seconds=0) is None
    sleeping.signal(signal.SIGKILL)
    assert sleeping.exit_code(within_seconds=30) == -signal.SIGKILL
    assert sleeping.exit_code(within_seconds=0) == -signal.SIGKILL
    sleeping.signal(signal.SIGKILL)


def test_a_child_is_killed_when_it_is_abandoned(fork_server: ForkServer, output: str) -> None:
    child = fork_server.fork(ForkRequest(reference(sleep_stubbornly), output=output))
    os.kill(child.pid, signal.SIGSTOP)
    child.abandon()
    assert wait_until(lambda: not alive(child.pid), what="the child's end") < stretched(1)


def test_a_child_is_killed_when_its_client_is(fork_server: ForkServer, output: str) -> None:
    code = (
        "import json, sys, time; from deepspeed_bamboo.testing.fork_server import ForkRequest, fork; "
        # It keeps the child, which ends with the connection that it holds.
        f"child = fork({fork_server.address!r}, ForkRequest({reference(sleep)!r}, output={output!r})); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    assert alive(pid)
    client.kill()
    client.wait()
    wait_until(lambda: not alive(pid), what="the child's end")
    client.stdout.close()


def test_server_and_children_end_with_their_owner(output: str) -> None:
    code = (
        "import time; from deepspeed_bamboo.testing.fork_server import ForkRequest, ForkServer\n"
        f"server = ForkServer(); child = server.fork(ForkRequest({reference(sleep_stubbornly)!r}, output={output!r}))\n"
        "print(server._process.pid, child.pid, server._folder.name, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server, child, folder = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    wait_until(lambda: not alive(int(server)) and not alive(int(child)), what="the end of both")
    owner.stdout.close()
    wait_until(lambda: not Path(folder).exists(), what="the folder to be gone")


def test_a_server_that_cannot_import_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="could not import no_such_module"):
        ForkServer(["no_such_module"])
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_requests_that_make_no_sense_do_not_harm_the_server(fork_server: ForkServer, output: str) -> None:
    import socket

    for text in (b"", b"nonsense\n", b'{"unknown": 1}\n', json.dumps({"target": "x:y"}).encode()):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(fork_server.address)
            client.sendall(text)
    request = ForkRequest(reference(greet), ("you", 0), output=output)
    assert fork(fork_server.address, request).exit_code(within_seconds=60) == 0


def test_only_importable_functions_can_be_called_elsewhere() -> None:
    def inner() -> None: ...

    for function in (inner, lambda: None):
        with pytest.raises(LaunchError, match="top level of a module"):
            reference(function)


def test_a_machine_ends_what_runs_beyond_its_limit(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_ignoring_sigterm, workers=2) as machine:
        pids = [machine.worker_pid(rank) for rank in (0, 1)]
        outcome = machine.wait(within_seconds=0.5)
        assert outcome.timed_out and outcome.exit_codes == {0: None, 1: None}
        pids += machine.agent_pids.values()
    wait_until(lambda: not any(map(alive, pids)), what="the end of agents and workers")


def test_a_machine_can_share_a_coordinator(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.trivial, workers=1) as one:
        with Machine(fork_server, workers.trivial, workers=1, endpoints=one.endpoints) as two:
            assert two.endpoints == one.endpoints and two.job != one.job
            with pytest.raises(LaunchError, match="no etcd of its own"):
                _ = two.etcd
            assert two.wait(within_seconds=60).exit_codes == {0: 0}
