"""Noticing deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_bamboo.elastic.processes import DeathWatch, ProcessIdentity, launcher_chain
from tests.coordination.helpers import Collector, stretched


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_each_death_is_told_at_once_and_once() -> None:
    one, two = sleeper(), sleeper()
    told: Collector[int] = Collector()
    watch = DeathWatch([one.pid, two.pid], told)
    killed = time.monotonic()
    one.kill()
    _, when = told.wait_for(lambda pid: pid == one.pid)
    assert when - killed < stretched(0.05)
    two.kill()
    told.wait_for(lambda pid: pid == two.pid)
    assert told.items == [one.pid, two.pid]
    watch.stop()
    watch.stop()
    for process in (one, two):
        assert process.wait() == -signal.SIGKILL, "the watch does not collect the process"


def test_a_process_that_is_gone_already_counts() -> None:
    process = sleeper()
    process.kill()
    process.wait()
    told: Collector[int] = Collector()
    DeathWatch([process.pid], told)
    told.wait_for(lambda pid: pid == process.pid)


def test_nothing_is_told_after_stop_and_no_descriptor_stays() -> None:
    process = sleeper()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    told: Collector[int] = Collector()
    watch = DeathWatch([process.pid], told)
    watch.stop()
    process.kill()
    process.wait()
    assert told.items == []
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_an_identity_is_not_taken_over_by_a_later_process() -> None:
    process = sleeper()
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None and identity.runs()
    assert not ProcessIdentity(identity.pid, identity.start_ticks - 1).runs()
    process.kill()
    process.wait()
    assert not identity.runs() and ProcessIdentity.of(process.pid) is None


@pytest.mark.parametrize(("name", "length"), [("deepspeed", 2), ("bash-like", 1)])
def test_the_command_above_the_launcher_counts_if_it_is_deepspeed(tmp_path: Path, name: str, length: int) -> None:
    slot = "from deepspeed_bamboo.elastic.processes import launcher_chain as c; print(*c())"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {slot!r}], check=True)"
    command = tmp_path / name
    command.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {launcher!r}], check=True)\n")
    process = subprocess.Popen([sys.executable, str(command)], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    chain = [int(pid) for pid in out.split()]
    assert len(chain) == length
    assert (process.pid in chain) == (length == 2)
    assert launcher_chain()[0] == os.getppid()
