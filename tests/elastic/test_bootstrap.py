"""How a worker process ends: what Python does for the script at its end, and not its own teardown."""

from __future__ import annotations

import os
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
