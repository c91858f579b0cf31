"""Every event of a job names its run, another one for each start."""

from __future__ import annotations

import time
from pathlib import Path

from deepspeed_bamboo.eventlog.files import read_worker_files
from deepspeed_bamboo.eventlog.runs import run_name, runs_in
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train


def test_each_start_of_a_job_is_a_run_though_its_files_are_continued(jobs: Jobs, tmp_path: Path) -> None:
    began = time.time()
    training = Training("named", 1, steps=2, faults=[], bamboo={"event_log": str(tmp_path)})
    for _ in range(2):
        result = jobs.run(train, world=1, training=training)
        assert result.codes == [0], result.transcript()
    files = read_worker_files(tmp_path)
    first, second = runs_in(files)
    assert list(files) == list(first.files) == list(second.files) == ["events-w0.jsonl"]
    assert all(event.get("run") for event in files["events-w0.jsonl"])
    assert [sorted(run.losses) for run in (first, second)] == [[0, 1], [0, 1]]
    for run in (first, second):
        job = run.name.partition("@")[0]
        assert job.startswith("job") and run_name(job, time_seconds=began) < run.name, "by job and time"
    assert first.name != second.name
