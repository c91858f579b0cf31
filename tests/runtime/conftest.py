from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.jobs import Jobs, jobs_in


@pytest.fixture(scope="package")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Runs worker processes; shared, since etcd and the forkserver take a few seconds to start."""
    with jobs_in(tmp_path_factory.mktemp("jobs")) as running:
        yield running
