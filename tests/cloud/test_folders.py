"""Folders for checkpoints: a directory and a bucket do the same, and say what is wrong in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Fill, Folder, location_problem, open_folder
from deepspeed_bamboo.storage.place import CheckpointPlace

Make = Callable[[str], Folder]


@pytest.fixture(params=["directory", "bucket"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Opens the folder of a name, where nothing is yet."""
    if request.param == "directory":
        yield lambda name: open_folder(str(tmp_path / name))
        return
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield lambda name: open_folder(f"s3://bucket/{name}/")


def data(text: str) -> Fill:
    return lambda file: file.write(text.encode())


def test_files_come_back_and_folders_go(make: Make) -> None:
    folder = make("a/b")
    assert folder.read_text("latest") is None and folder.folders() == []
    for name in ("latest", "one/x.pt", "one/y.pt", "two/x.pt"):
        folder.write(name, data(name))
    folder.write("latest", data("again"))
    assert folder.read_text("latest") == "again" and folder.folders() == ["one", "two"]
    with folder.local("one") as directory:
        found = {str(path.relative_to(directory)): path.read_text() for path in (directory / "one").iterdir()}
    assert found == {"one/x.pt": "one/x.pt", "one/y.pt": "one/y.pt"}
    folder.remove("one")
    assert folder.folders() == ["two"] and make("a").folders() == ["b"] and make("other").folders() == []


def test_of_two_jobs_the_later_one_has_the_place(make: Make) -> None:
    first = CheckpointPlace(make("place"), name="place", owner="first")
    second = CheckpointPlace(make("place"), name="place", owner="second")
    first.take()
    assert first.last(worker="w") is None
    for step in (1, 2, 3):
        first.write(f"bamboo_step{step}/x.pt", data("x"))
        first.name_last(step)
    first.name_last(2)  # a reporter that was slow
    first.write("by_a_script/x.pt", data("x"))
    first.write("bamboo_step9/x.pt", data("not complete"))
    assert first.last(worker="w") == "bamboo_step3"
    second.take()
    assert second.last(worker="w") == "bamboo_step3"
    with pytest.raises(CheckpointError, match="'place' is another job's by now .* a directory of its own"):
        first.name_last(9)
    with pytest.raises(CheckpointError, match="to worker w the file bamboo.json there says 'second', not 'first'"):
        first.last(worker="w", within_seconds=0)
    second.discard({9, 8})
    assert make("place").folders() == ["bamboo_step2", "bamboo_step3", "by_a_script"]
    second.write("bamboo_step4/x.pt", data("x"))
    second.name_last(4)
    assert make("place").folders() == ["bamboo_step3", "bamboo_step4", "by_a_script"]


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for problem in (
        lambda: open_folder(str(tmp_path / "file")).write("a", data("x")),
        lambda: open_folder(str(tmp_path / "file")).read_text("a"),
        lambda: open_folder(str(tmp_path)).remove("absent"),
    ):
        with pytest.raises(CheckpointError, match="can't be (written|read|cleared) .*has it room"):
            problem()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws(), pytest.raises(CheckpointError, match="s3://absent/x can't be written .*the bucket's name"):
        open_folder("s3://absent/x").write("a", data("x"))


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        ("gs://bucket/x", "begins with gs://; give a directory that all machines see, or s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://Bucket/x", "names no bucket"),
    ],
)
def test_places_that_are_none(location: str, rule: str) -> None:
    assert rule in (location_problem(location) or "")


@pytest.mark.parametrize("location", ["s3://bucket", "s3://my-bucket.x/a/b", "/mnt/kept", "kept", "a b/c:d"])
def test_places_that_may_be(location: str) -> None:
    assert location_problem(location) is None
