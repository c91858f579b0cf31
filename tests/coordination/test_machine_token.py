"""A token that one process has at a time."""

from __future__ import annotations

import subprocess
import sys
import time

from deepspeed_bamboo.coordination.machine_token import MachineToken
from tests.coordination.helpers import unique_name


def test_one_has_it_until_it_is_given_back() -> None:
    name = unique_name()
    one, other, elsewhere = MachineToken(name, "a"), MachineToken(name, "a"), MachineToken(name, "b")
    assert one.take() and one.take() and elsewhere.take()
    before = time.monotonic()
    assert not other.take(within_seconds=0.2) and time.monotonic() - before >= 0.2
    one.release()
    one.release()
    assert other.take()
    other.release()
    elsewhere.release()


def test_that_of_a_killed_process_is_free() -> None:
    name = unique_name()
    program = "import sys; from deepspeed_bamboo.coordination.machine_token import MachineToken as T"
    program += "; t = T(sys.argv[1]); print(t.take(), flush=True); sys.stdin.read()"
    token = MachineToken(name)
    with subprocess.Popen(
        [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        assert not token.take()
        holder.kill()
        holder.wait()
        assert token.take()
    token.release()
