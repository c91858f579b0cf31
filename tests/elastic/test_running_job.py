"""Looking for a job's own etcd on this machine, when that does not answer."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_bamboo.coordination import JobNameTaken
from deepspeed_bamboo.coordination.published import PublishedJob, own_pid_namespace, publish, published_jobs
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.running_job import private_job
from tests.coordination.helpers import freeze


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishedJob]:
    """A job whose etcd was stopped by SIGSTOP."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with PrivateEtcd() as server:
        about = PublishedJob("still", "/deepspeed_bamboo", str(server.endpoint), os.getpid(), own_pid_namespace())
        publish(server.directory, about)
        freeze(server.pid)
        try:
            yield about
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_job_whose_etcd_is_silent_is_not_started_twice(silent: PublishedJob) -> None:
    assert published_jobs("still") == [silent]
    with (
        pytest.raises(JobNameTaken, match=r"'still' at .* has not answered for 0\.5 s, and process \d+.*--job NAME"),
        private_job("still", within_seconds=0.5),
    ):
        pass
    with private_job("other", within_seconds=0.5) as found:
        assert found is None
