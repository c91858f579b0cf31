"""Checkpoints that the plugin takes by itself: a job that lost what nobody else held goes on from them, bit by bit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from deepspeed_bamboo.storage.place import CheckpointPlace
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train, train_remembering, train_with_checkpoints, train_with_joiners
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, kill

TRAINING = Training(
    "tied-bf16-1x3",
    3,
    layers="tied",
    dropout=0.2,
    steps=8,
    settings={**CLIPPED, **SCHEDULE, **BF16},
    bamboo=CHECKED,
    faults=[],
)
BUCKET = "checkpoints"


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """A service that speaks S3's language, with a bucket; as the environment of who uses it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    yield environment
    server.stop()


@pytest.fixture(scope="module")
def expected(jobs: Jobs) -> JobResult:
    """How the training goes undisturbed."""
    return jobs.run(train, world=3, training=TRAINING)


def test_a_job_that_lost_a_stage_and_its_shadow_goes_on(jobs: Jobs, tmp_path: Path, expected: JobResult) -> None:
    folder, again = tmp_path / "kept", tmp_path / "again"
    # Nobody is left; the checkpoints of steps 1 and 4 are complete by then.
    fatal = dataclasses.replace(TRAINING, faults=[kill(6, 0, stage, "idle") for stage in range(3)])
    lost = jobs.run(train_with_checkpoints, world=3, training=fatal, folder=str(folder))
    assert lost.codes == [-9, -9, -9], lost.transcript()
    assert (folder / "latest").read_text() == "bamboo_step4", sorted(folder.iterdir())
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["bamboo_step1", "bamboo_step4"]
    shutil.copytree(folder, again)
    # By the engine's step, and by its own count with an iterator that begins at step 0: nothing is done twice.
    resumed = jobs.run(train_with_checkpoints, world=3, training=TRAINING, folder=str(folder))
    counting = jobs.run(train_with_checkpoints, world=3, training=TRAINING, folder=str(again), by_count=True)
    losses = {str(step): loss for step, loss in enumerate(expected.common("losses"))}
    assert resumed.common("losses") == {step: losses[step] for step in ("4", "5", "6", "7")}, resumed.transcript()
    assert counting.common("losses") == losses, "those of before, too, though nothing is done twice"
    for result in (resumed, counting):
        assert result.common("digest") == expected.common("digest") and result.common("steps") == 8
        assert "this job goes on from step 4" in result.transcript()
    assert (folder / "latest").read_text() == (again / "latest").read_text() == "bamboo_step8"


@pytest.mark.sweep
@pytest.mark.parametrize("at", ["idle", "forward", "commit", "step", "save"])
def test_a_job_that_is_lost_whole_again_and_again_goes_on(
    jobs: Jobs, tmp_path: Path, expected: JobResult, at: str
) -> None:
    folder, seen = str(tmp_path / "kept"), []
    for step in range(1, TRAINING.steps):
        faults = [kill(step, 0, stage, at, *([1] if at == "forward" else [])) for stage in range(3)]
        lossy = dataclasses.replace(TRAINING, name=f"{at}-{step}", faults=faults)
        seen.append(jobs.run(train_with_checkpoints, world=3, training=lossy, folder=folder).codes.count(-9))
    last = jobs.run(train_with_checkpoints, world=3, training=TRAINING, folder=folder)
    assert last.common("digest") == expected.common("digest") and max(seen) >= 2, (seen, last.transcript())


def test_what_a_counting_script_did_on_its_way_is_left_out(jobs: Jobs, tmp_path: Path) -> None:
    """What belongs behind the last of its steps is done: the state of the checkpoint is the one before that."""
    training = dataclasses.replace(TRAINING, stages=2, dropout=0.0, evaluate_before=(1, 3, 6))
    lost = [kill(6, 0, stage, "idle") for stage in range(2)]
    short = dataclasses.replace(training, faults=lost, evaluate_before=())
    jobs.run(train_with_checkpoints, world=2, training=short, folder=str(tmp_path / "kept"), penalised=True)
    options: dict[str, Any] = {"world": 2, "training": training, "by_count": True, "penalised": True}
    whole = jobs.run(train_with_checkpoints, folder=str(tmp_path / "whole"), **options)
    again = jobs.run(train_with_checkpoints, folder=str(tmp_path / "kept"), **options)
    assert again.common("evaluations") == {**whole.common("evaluations"), "1": None}, again.transcript()
    # The script's own collectives are all workers' throughout.
    assert again.common("metrics") == whole.common("metrics") == list(whole.common("losses").values())
    assert again.common("unknown norms") == [step < 4 for step in range(8)] and not any(whole.common("unknown norms"))
    assert again.common("additional") == whole.common("additional") and len(whole.common("additional")) == 8
    told = "get_global_grad_norm is not known of steps that the job did before"
    assert [output.count(told) for output in again.outputs.values()] == [1, 1]
    assert whole.common("own") == ["after1", "after3", "after6"] and again.common("own") == ["after3", "after6"]
    assert again.common("digest") == whole.common("digest")


@pytest.mark.sweep
def test_weights_that_a_counting_script_changes_on_its_way_are_those_of_the_checkpoint(
    jobs: Jobs, tmp_path: Path
) -> None:
    """What it does after the last of its steps that are passed by is done to them."""
    training = dataclasses.replace(TRAINING, stages=2, dropout=0.0)
    short = dataclasses.replace(training, faults=[kill(6, 0, stage, "idle") for stage in range(2)])
    options: dict[str, Any] = {"world": 2, "by_count": True, "decays": True}
    whole = jobs.run(train_with_checkpoints, training=training, folder=str(tmp_path / "whole"), **options)
    jobs.run(train_with_checkpoints, training=short, folder=str(tmp_path / "kept"), **options)
    shutil.copytree(tmp_path / "kept", tmp_path / "again")
    again = jobs.run(train_with_checkpoints, training=training, folder=str(tmp_path / "kept"), **options)
    assert again.common("losses") == whole.common("losses"), again.transcript()
    assert again.common("digest") == whole.common("digest")
    assert "on its way to step 4 the script has changed weights" in again.transcript()
    for output in again.outputs.values():
        assert output.count("the script looks at the model's parameters at steps that the job did before") == 1
    options["by_count"] = False
    refused = jobs.run(train_with_checkpoints, training=training, folder=str(tmp_path / "again"), **options)
    assert refused.survivors == [] and "Do it before initialize, or only `if engine.global" in refused.transcript()


def test_in_a_bucket_with_losses_while_it_is_written(jobs: Jobs, s3: dict[str, str], expected: JobResult) -> None:
    where = {"folder": f"s3://{BUCKET}/a/job", "environment": s3}
    # The part of stage 1 in the checkpoint of step 4 is lost, so the next one is taken at once, at step 6; and while
    # the last state is written, another worker is lost.
    short = dataclasses.replace(TRAINING, steps=7, faults=[kill(4, 0, 1, "save"), kill(7, 0, 2, "save")])
    broken = jobs.run(train_with_checkpoints, world=3, training=short, **where)
    assert len(broken.survivors) == 1 and broken.common("saved") == [3, 7], broken.transcript()
    resumed = jobs.run(train_with_checkpoints, world=3, training=TRAINING, **where)
    assert resumed.common("losses") == {"7": expected.common("losses")[7]}, resumed.transcript()
    assert resumed.common("digest") == expected.common("digest")
    assert f"goes on from step 7, from s3://{BUCKET}/a/job/bamboo_step7" in resumed.transcript()


@pytest.mark.sweep
@pytest.mark.parametrize("at", ["idle", "step"])
def test_survivors_go_back_in_place_to_a_bucket(jobs: Jobs, s3: dict[str, str], at: str) -> None:
    """Owner and shadow of a stage are lost, and nothing is kept in memory."""
    training = Training("bucket-1x4", 4, steps=9, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, faults=[])
    whole = jobs.run(train_remembering, world=4, training=training)
    killed = dataclasses.replace(training, faults=[kill(6, 0, stage, at) for stage in (0, 1)])
    stored = f"s3://{BUCKET}/in/place"
    result = jobs.run(train_remembering, world=4, training=killed, stored=stored, environment=s3)
    assert result.survivors == [2, 3] and result.common("sources") == ["store"], result.transcript()
    assert result.common("losses") == whole.common("losses")
    assert all(loss == whole.common("losses")[str(step)] for step, loss in result.common("redone"))
    assert result.common("redone") and result.common("digest") == whole.common("digest")


def test_a_reporter_that_stands_by_still_takes_and_names_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    """A node joins, and the stages are spread over both nodes: the first worker has none then. Later it is lost."""
    training = Training("kept-1x2", 2, steps=14, bamboo=CHECKED, faults=[])
    plain = jobs.run(train_with_joiners, world=2, training=training, waits={})
    notice = {**kill(8, 0, 1, "forward", 1), "signal": "NOTICE", "seconds": 60.0}
    moved = jobs.run(
        train_with_joiners,
        world=2,
        joining=1,
        sites=["a/1", "a/1", "b/2"],
        training=dataclasses.replace(training, faults=[notice]),
        waits={"1": 1},
        kept=str(tmp_path / "kept"),
    )
    # Node a is left in step 9 with the first worker, which stood by until then, and with the reporter's role.
    assert moved.survivors == [2] and moved.values[2]["reporter"], moved.transcript()
    assert moved.common("digest") == plain.common("digest")
    members, first_hosts = moved.values[2]["members"], moved.values[2]["first_hosts"]
    assert members[0] == ["w0", "w1", "w2"] and members[-1] == ["w2"], members
    assert first_hosts[:6] == [0] * 6 and first_hosts[-1] == 2, first_hosts
    saved = moved.values[2]["saved"]
    assert len([step for step in saved if step <= 8]) >= 2 and saved[-1] == 14, (saved, moved.transcript())
    assert any(9 <= step < 14 for step in saved), saved
    again = jobs.run(train_with_joiners, world=2, training=training, waits={}, kept=str(tmp_path / "kept"))
    assert again.common("digest") == plain.common("digest") and again.common("losses") == {}


def test_what_cannot_be_written_ends_nothing(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "bamboo_step1").write_text("a file where the checkpoint of step 1 has to be")
    short = dataclasses.replace(TRAINING, stages=2, steps=4)
    result = jobs.run(train_with_checkpoints, world=2, training=short, folder=str(folder))
    assert result.survivors == [0, 1] and result.common("saved")[-1] == 4, result.transcript()
    assert f"'{folder}' can't be written" in result.common("told")[0]
    assert (folder / "latest").read_text() == "bamboo_step4"


def test_a_place_that_only_some_see_is_refused_at_once(jobs: Jobs, tmp_path: Path) -> None:
    short = dataclasses.replace(TRAINING, stages=2)
    result = jobs.run(impatient, world=2, training=short, folder=str(tmp_path / "of-{rank}"))
    assert result.survivors == [] and "a directory that all machines see" in result.transcript()
    assert not list(tmp_path.glob("*/bamboo_step*"))


def impatient(**arguments: Any) -> dict[str, Any]:
    """As a worker that doesn't wait for what other machines' files may take."""
    CheckpointPlace.check_visible.__kwdefaults__["within_seconds"] = 0.1
    return train_with_checkpoints(**arguments)
