"""A check that each test leaves the machine as it found it, and jobs under DeepSpeed's launcher.

Processes are known by a variable in their environment, files by a temporary folder of their own, so
that whatever else runs on the machine is not mistaken for something left behind.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed_bamboo.testing.fork_server import ForkServer
from tests.conftest import MARK
from tests.elastic.launched import LaunchedJob


@pytest.fixture
def launch_job(fork_server: ForkServer) -> Callable[..., LaunchedJob]:
    """A ``LaunchedJob`` whose launcher and slots are forked."""
    return functools.partial(LaunchedJob, server=fork_server)


def _is_ours(pid: int) -> bool:
    mark = f"{MARK}={os.environ[MARK]}\0".encode()
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return False


def _processes() -> set[int]:
    """Those with the mark that run; one that has ended and waits for init to collect it has no environment."""
    return {pid for pid in psutil.pids() if _is_ours(pid) and pid != os.getpid()}


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if not path.name.startswith("pytest-of")}


@pytest.fixture(autouse=True)
def nothing_stays_behind(temporary_folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, temporary file or folder outlives a test by more than a moment."""
    if "fork_server" in request.fixturenames:
        request.getfixturevalue("fork_server")
    processes, files = _processes(), _files(temporary_folder)
    yield
    deadline = time.monotonic() + 5
    while (_processes() - processes or _files(temporary_folder) - files) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [psutil.Process(pid).cmdline() for pid in _processes() - processes]
    assert left == [] and _files(temporary_folder) - files == set()
