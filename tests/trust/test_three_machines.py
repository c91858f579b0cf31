"""A job on three machines with an etcd of its own: where it listens, and what a fourth machine gets from it.

Network namespaces on one bridge stand for the machines. They share a home directory, as on many clusters.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_bamboo.trust.handshake import GREETING
from tests.trust.namespaces import enter_network, networks
from tests.trust.visits import GREETING_BYTES, NOBODY, answers, as_somebody

REPOSITORY = Path(__file__).parents[2]
MACHINES = 3
SUBNET = "10.83.9"
FIRST = f"{SUBNET}.1"
MASTER_PORT = 29561
TLS_REFUSAL_BYTES = 7  # an alert
_LISTENS = "0A"  # as the kernel writes that state

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def start(number: int, network: str, folder: Path, *, steps: int, home: Path) -> subprocess.Popen[str]:
    world = base64.urlsafe_b64encode(json.dumps({f"node{n}": [0] for n in range(MACHINES)}).encode()).decode()
    command = ["ip", "netns", "exec", network, sys.executable, "-u", "-m", "deepspeed.launcher.launch",
               f"--world_info={world}", f"--node_rank={number}", f"--master_addr={FIRST}",
               f"--master_port={MASTER_PORT}", "--module", "deepspeed_bamboo.launch", "--job", "three",
               "scripts/train.py", "--stages", str(MACHINES), "--steps", str(steps), "--event-log", str(folder),
               "--deepspeed_config", "configs/cpu-demo.json"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(home), "BAMBOO_NODE": f"node{number}"}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def listeners(network: str) -> list[tuple[str, int]]:
    """Of all processes in that namespace, as its own table of TCP sockets has them."""
    pids = subprocess.run(["ip", "netns", "pids", network], capture_output=True, text=True, check=True).stdout.split()
    found = []
    for line in Path(f"/proc/{pids[0]}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]:
        local, _, state = line.split()[1:4]
        place, port = local.split(":")
        if state == _LISTENS:
            found.append((socket.inet_ntoa(int(place, 16).to_bytes(4, "little")), int(port, 16)))
    return found


def trained(folder: Path) -> int:
    return max((file.read_text(encoding="utf-8").count('"step", "loss') for file in folder.glob("events-*")), default=0)


def test_each_machine_listens_on_its_own_address_and_a_fourth_gets_nothing(tmp_path: Path) -> None:
    events, home = tmp_path / "events", tmp_path / "home"
    home.mkdir()
    with networks(MACHINES + 1, subnet=SUBNET) as names:
        *machines, stranger = names
        jobs = [start(n, name, events, steps=60, home=home) for n, name in enumerate(machines)]
        try:
            deadline = time.monotonic() + 180
            while not any(events.glob("events-*")) or not trained(events):
                assert time.monotonic() < deadline and all(job.poll() is None for job in jobs), _output(jobs)
                time.sleep(0.05)
            found = [listeners(name) for name in machines]
            for number, of_one in enumerate(found):
                assert {place for place, _ in of_one} == {address(number)}, found
            # A worker: its store, gloo, and what gloo's groups of the start leave. The first machine also has the
            # gate to etcd and the place where torch's groups met.
            assert len({len(of_one) for of_one in found[1:]}) == 1 and len(found[0]) == len(found[1]) + 2 <= 14, found

            places = [place for of_one in found for place in of_one]
            heard = ast.literal_eval(
                as_somebody(NOBODY, lambda: answers(places), enter=lambda: enter_network(stranger))
            )
            assert [one for one in heard if len(one[1]) > GREETING_BYTES] == []
            said = {place: [answer for at, answer in heard if at == place] for place in places}
            (gate,) = [place for place, words in said.items() if words[-1].startswith(GREETING)]
            assert gate[0] == FIRST and max(map(len, said[gate][:-1])) <= TLS_REFUSAL_BYTES, said[gate]
            assert (home / ".deepspeed_bamboo" / "secret").stat().st_mode & 0o777 == 0o600
            assert [job.wait(180) for job in jobs] == [0] * MACHINES, _output(jobs)
            assert trained(events) == 60
        finally:
            for job in jobs:
                job.terminate()
            for job in jobs:
                job.wait(60)


def _output(jobs: list[subprocess.Popen[str]]) -> str:
    for job in jobs:
        job.terminate()
    return "\n".join(f"--- {number}\n{job.communicate(timeout=60)[0][-3000:]}" for number, job in enumerate(jobs))
