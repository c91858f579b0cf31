from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepspeed_bamboo.testing.fork_server import ForkServer
from tests.runtime.jobs import Jobs, jobs_in


@pytest.fixture(scope="package")
def jobs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Runs worker processes; shared, as etcd takes a moment to start."""
    with jobs_in(tmp_path_factory.mktemp("jobs"), fork_server) as running:
        yield running
