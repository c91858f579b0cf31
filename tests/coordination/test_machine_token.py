"""A token that one process has at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

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


STRANGER = """
import os, socket, sys
os.setuid(65534)
for name in sys.argv[2:]:
    s = socket.socket(socket.AF_UNIX, getattr(socket, sys.argv[1]))
    s.bind(chr(0) + name)
    if sys.argv[1] == "SOCK_STREAM":
        s.listen()
    globals()[name] = s
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_another_user_who_holds_its_names_is_no_holder(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    one, other = MachineToken(name := unique_name()), MachineToken(name)
    places = [place[1:] for place in one._places]
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, kind, *places[:2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == "holds\n"
        assert one.take() and not other.take()
        if kind == "SOCK_STREAM":  # names of another kind are another space
            assert "user 65534 holds a name that this user's jobs use" in caplog.text
        stranger.kill()
        stranger.wait()
        late = MachineToken(name)
        assert not late.take(), "the first name is free again, and the token is not"
        one.release()
        assert late.take()
    late.release()
