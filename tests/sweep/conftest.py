"""What several tests of real jobs share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.testing.fork_server import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Forks agents and workers that find the environment of a job."""
    before = dict(os.environ)
    os.environ.update(job_environment())
    try:
        with ForkServer(PRELOAD) as server:
            yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
