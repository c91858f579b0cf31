"""Folders for checkpoints: a directory and a bucket do the same, and say what is wrong in the same way."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.checking import choose
from deepspeed_bamboo.storage.folders import Fill, Folder, location_problem, open_folder
from deepspeed_bamboo.storage.manifest import Manifest
from deepspeed_bamboo.storage.place import JOB, STARTED, CheckpointPlace, tag_of
from tests.storage.memory_folder import MemoryFolder

Make = Callable[[str], Folder]


@pytest.fixture(params=["directory", "bucket", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Opens the folder of a name, where nothing is yet."""
    if request.param == "memory":
        folders: defaultdict[str, MemoryFolder] = defaultdict(MemoryFolder)
        yield lambda name: folders[name]
        return
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
    assert folder.sizes("one") == {"x.pt": 8, "y.pt": 8} and folder.sizes("three") == {}
    assert b"".join(folder.chunks("one/x.pt")) == b"one/x.pt"
    with pytest.raises(CheckpointError):
        list(folder.chunks("one/z.pt"))
    folder.write("latest", lambda file: file.write(b"\xff"))
    assert folder.read_text("latest") == "\ufffd"
    if not isinstance(folder, MemoryFolder):
        with folder.local("one") as directory:
            found = {str(path.relative_to(directory)): path.read_text() for path in (directory / "one").iterdir()}
        assert found == {"one/x.pt": "one/x.pt", "one/y.pt": "one/y.pt"}
    folder.remove_file("one/y.pt")
    assert folder.sizes("one") == {"x.pt": 8}
    folder.remove("one")
    assert folder.folders() == ["two"] and make("other").folders() == []
    if not isinstance(folder, MemoryFolder):
        assert make("a").folders() == ["b"]


def named(place: CheckpointPlace, step: int, *, kept: tuple[int, ...] = ()) -> str:
    """A checkpoint of one file that is written and named."""
    fact = place.write(f"{tag_of(step)}/x.pt", data("x"))
    assert (fact.size, fact.sha256) == (1, sha256(b"x").hexdigest())
    return place.name_last(Manifest(tag_of(step), step, (1, 1), {"x.pt": fact}), kept=kept, keep=2)


def test_of_two_jobs_the_later_one_has_the_place(make: Make) -> None:
    first = CheckpointPlace(make("place"), name="place", owner="first")
    second = CheckpointPlace(make("place"), name="place", owner="second")
    first.take()
    first.check_visible(worker="w")
    for step in (1, 2, 3):
        assert named(first, step, kept=tuple(range(1, step))) == ""
    named(first, 2)  # a reporter that was slow
    first.write("by_a_script/x.pt", data("x"))
    first.write("bamboo_step9/x.pt", data("not complete"))
    assert first.survey().latest == "bamboo_step3"
    assert make("place").folders() == ["bamboo_step2", "bamboo_step3", "bamboo_step9", "by_a_script"]
    second.take()
    chosen = choose(second.survey(), check=second.problems_of, where="place")
    assert chosen.tag == "bamboo_step3" and second.known_whole(chosen) == (2, 3)
    with pytest.raises(CheckpointError, match="'place' has been taken by another job .* a directory of its own"):
        named(first, 9)
    with pytest.raises(CheckpointError, match="to worker w the file bamboo.json there says 'second', not 'first'"):
        first.check_visible(worker="w", within_seconds=0)
    second.discard({9, 8, 3})  # what was completed stays
    assert make("place").folders() == ["bamboo_step2", "bamboo_step3", "by_a_script"]
    make("place").write("bamboo_step4/layer_07-model_states.pt", data("of an earlier job"))
    named(second, 4, kept=(2, 3))
    assert make("place").folders() == ["bamboo_step3", "bamboo_step4", "by_a_script"]
    assert not second.problems_of(second.survey().candidates[0])
    make("place").remove_file("bamboo_step3/x.pt")
    assert named(second, 5, kept=(3, 4)) == ""  # 4 and 5 are kept, and 3 was to go anyway
    make("place").remove_file("bamboo_step4/x.pt")
    second.write("bamboo_step1/x.pt", data("x"))
    assert (
        named(second, 6, kept=(4,))
        == "bamboo_step4 in place is not whole any more, so bamboo_step1, bamboo_step5 stays"
    )
    assert make("place").folders()[:2] == ["bamboo_step1", "bamboo_step4"]


def test_a_job_that_starts_anew_reads_what_is_in_a_place_that_is_full_by_now(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job is refused before it trains."""
    CheckpointPlace(make("place"), name="place", owner="first").take()

    def write(name: str, fill: Fill) -> None:
        raise CheckpointError(f"{name}: no space")

    monkeypatch.setattr(full := make("place"), "write", write)
    with pytest.raises(CheckpointError, match="no space"):
        CheckpointPlace(full, name="place", owner="second").take()
    anew = CheckpointPlace(full, name="place", owner="first")
    anew.take()
    anew.check_visible(worker="w", within_seconds=0)


def mark(job: str, started: float | None) -> str:
    return json.dumps({JOB: job, STARTED: started})


def test_who_joins_when_nobody_can_say_any_more_when_the_job_was_started(make: Make) -> None:
    """An etcd that came back without its data; the job goes on."""
    CheckpointPlace(make("place"), name="place", owner=mark("gpt", 1.0)).take()
    joiner = CheckpointPlace(make("place"), name="place", owner=mark("gpt", None))
    joiner.check_visible(worker="w", within_seconds=0)
    assert named(joiner, 3) == "" and joiner.survey().latest == "bamboo_step3"
    for owner in (mark("gpt", 2.0), mark("other", None), "gpt"):
        other = CheckpointPlace(make("place"), name="place", owner=owner)
        with pytest.raises(CheckpointError, match="to worker w the file bamboo.json there says"):
            other.check_visible(worker="w", within_seconds=0)


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for problem in (
        lambda: open_folder(str(tmp_path / "file")).write("a", data("x")),
        lambda: open_folder(str(tmp_path / "file")).read_text("a"),
        lambda: open_folder(str(tmp_path)).remove("absent"),
    ):
        with pytest.raises(CheckpointError, match="can't be (written|read|cleared) .*has room"):
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
