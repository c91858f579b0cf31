"""Settings for all tests."""

import os
import signal
import tempfile

import pytest
from hypothesis import settings

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
        folder = tempfile.TemporaryDirectory(prefix="bamboo-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name
