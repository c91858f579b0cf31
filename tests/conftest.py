"""Settings for all tests."""

import gc
import multiprocessing.util
import os
import signal
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.testing.fork_server import ForkServer

MARK = "BAMBOO_TEST_SESSION"

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("deepspeed_bamboo", deadline=None)
settings.load_profile("deepspeed_bamboo")

# A shell starts what it runs in the background with Ctrl-C ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several pytest workers a temporary folder of its own.

    The jobs of this machine are looked for there: a test that expects one must not find another worker's.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        multiprocessing.util.get_temp_dir()  # type: ignore[attr-defined]  # elsewhere: it is removed after that folder
        folder = tempfile.TemporaryDirectory(prefix="bamboo-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without collecting garbage: what is imported stays, and to look through it takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of future collections of garbage: a million objects, which take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def temporary_folder() -> Iterator[Path]:
    """What TMPDIR names for everything that the tests start, and a mark in the environment of it all."""
    multiprocessing.util.get_temp_dir()  # type: ignore[attr-defined]  # elsewhere: it is removed after that folder
    with (
        tempfile.TemporaryDirectory(prefix="bamboo-state-") as state,
        tempfile.TemporaryDirectory(prefix="bamboo-tests-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", name)
        patch.setenv("XDG_STATE_HOME", state)
        patch.setattr(tempfile, "tempdir", name)
        patch.setenv(MARK, uuid.uuid4().hex)
        yield Path(name)


@pytest.fixture(scope="session")
def fork_server(temporary_folder: Path) -> Iterator[ForkServer]:
    """Forks what the tests run as agents, workers, launchers and scripts; to import all that takes it ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv(FAULTS, raising=False)
        # Six seconds of a core, which may take minutes beside other work: pytest's own limit of 300 is enough.
        patch.setattr("deepspeed_bamboo.testing.fork_server._START_SECONDS", 280.0)
        launchers = ("deepspeed.launcher.launch", "deepspeed.launcher.runner")
        server = ForkServer((*PRELOAD, *launchers, "tests.elastic.workers", "tests.runtime.scenarios"))
    with server:
        yield server
