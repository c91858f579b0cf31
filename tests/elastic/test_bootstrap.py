"""How a worker process ends: what Python does for the script at its end, and not its own teardown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time

class Kept:
    def __del__(self):
        print("torn down", flush=True)

kept = Kept()
kept.itself = kept
atexit.register(print, "handler")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 5])
def test_exit_handlers_run_and_nothing_is_torn_down(tmp_path: Path, code: int) -> None:
    (tmp_path / "ending.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "-m", "deepspeed_bamboo.elastic.bootstrap", "ending", str(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (ended.returncode, ended.stdout.split("\n")) == (code, ["thread", "handler", ""]), ended


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise KeyboardInterrupt('mine')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("signal.signal(signal.SIGINT, stop); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
    ],
)
def test_a_script_that_raises_keyboard_interrupt_has_failed_and_was_not_interrupted(
    tmp_path: Path, line: str, code: int
) -> None:
    stop = "def stop(*_):\n    raise KeyboardInterrupt"
    (tmp_path / "ending.py").write_text(f"import os, signal, time\n{stop}\n{line}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "deepspeed_bamboo.elastic.bootstrap", "ending"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == code, ended
    assert ("KeyboardInterrupt: mine" in ended.stderr) is (code == 1)
