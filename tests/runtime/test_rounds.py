"""Rounds of checkpoints with the real class for every worker, a folder in memory and a clock that tests move."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pytest

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.roles import reporter
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.rounds import CheckpointRounds
from deepspeed_bamboo.storage.checking import choose
from deepspeed_bamboo.storage.folders import Fill
from deepspeed_bamboo.storage.place import CheckpointPlace
from tests.storage.memory_folder import MemoryFolder

GRID = Grid(1, 2)
FIRST, SECOND = GRID
MINUTE = 60.0


class SlowFolder(MemoryFolder):
    """Writes of ``name`` wait until :attr:`go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        self.go = threading.Event()
        self.full = False

    def write(self, name: str, fill: Fill) -> None:
        if self.slow and name.endswith(self.slow):
            self.go.wait()
        if self.full and "/" in name:
            raise CheckpointError("no room")
        super().write(name, fill)


@dataclass
class FakeWorker:
    """See :class:`Copier`. What a stage is, is the text of the step."""

    worker: str
    members: list[str]
    owned: tuple[Coordinate, ...] = ()
    told: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def is_reporter(self) -> bool:
        return reporter(self.members) == self.worker

    def copy(self, coordinate: Coordinate, *, step: int) -> dict[str, Fill]:
        text = f"{coordinate} after {step}".encode()

        def fill(file: BinaryIO) -> None:
            file.write(text)

        return {f"bamboo_step{step}/layer_0{coordinate.stage}-model_states.pt": fill}

    def tell(self, text: str) -> None:
        if self.is_reporter:
            self.told.append(text)

    def warn(self, text: str) -> None:
        self.told.append(text)

    def log(self, action: str, **fields: Any) -> None:
        self.events.append((action, fields))


class Job:
    """``owners`` by worker; the first one is the reporter."""

    def __init__(self, owners: dict[str, tuple[Coordinate, ...]]) -> None:
        self.now, self.step = 0.0, 0
        self.folder = SlowFolder()
        self.members: list[str] = []
        self.workers: dict[str, FakeWorker] = {}
        self.rounds: dict[str, CheckpointRounds] = {}
        for name, owned in owners.items():
            self.add(name, owned)
        self.place().take()

    def place(self) -> CheckpointPlace:
        return CheckpointPlace(self.folder, name="place", owner="job")

    def add(self, name: str, owned: tuple[Coordinate, ...] = ()) -> None:
        """A worker; one that comes later is told what it has to know."""
        worker = FakeWorker(name, self.members, owned)
        rounds = CheckpointRounds(
            worker, place=self.place(), grid=GRID, interval_seconds=10 * MINUTE, keep=2, clock=lambda: self.now
        )
        if self.members:
            rounds.take(json.loads(json.dumps(self.rounds[self.members[0]].to_json())))
        self.members.append(name)
        self.workers[name], self.rounds[name] = worker, rounds

    def lose(self, name: str, *, heir: str) -> None:
        self.members.remove(name)
        self.workers[heir].owned = (*self.workers[heir].owned, *self.workers[name].owned)

    def iterate(self, *, minutes: float = 0.0, wait: tuple[str, ...] | None = None) -> None:
        """One iteration, before which the workers of ``wait`` (None: all) have written what they have to."""
        for name in self.members if wait is None else wait:
            self.rounds[name].wait()
        self.now += minutes * MINUTE
        self.step += 1
        agreed = {name: self.rounds[name].contribution(step=self.step) for name in self.members}
        for name in self.members:
            self.rounds[name].note(agreed)
        for name in self.members:
            self.rounds[name].take_if_due()

    @property
    def latest(self) -> str | None:
        for name in self.members:
            self.rounds[name].wait()
        return self.folder.read_text("latest")

    def check_whole(self) -> None:
        choice = choose(self.place().survey(), check=self.place().problems_of, where="place")
        assert choice.tag == self.latest and choice.verified and not choice.warnings and not choice.error


def test_one_after_the_other_and_the_last_two_stay() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    for _ in range(12):
        job.iterate(minutes=10)
    assert job.latest == "bamboo_step10" and job.folder.folders() == ["bamboo_step10", "bamboo_step7"]
    assert [action for action, _ in job.workers["w1"].events] == ["taken", "saved"] * 4
    job.check_whole()


def test_a_reporter_that_hosts_nothing_and_one_that_has_just_come() -> None:
    job = Job({"w0": (), "w1": (FIRST, SECOND)})
    job.iterate(minutes=10)
    job.add("w2")  # in the middle of a round
    job.iterate()
    job.lose("w0", heir="w1")
    job.lose("w1", heir="w2")  # drained: w2 has all that it had, and names what w1 wrote
    job.iterate()
    assert job.latest == "bamboo_step1"
    job.check_whole()
    for _ in range(4):
        job.iterate(minutes=10)
    assert job.latest == "bamboo_step5"
    job.check_whole()


def test_a_reporter_lost_while_it_names_and_one_lost_while_it_writes() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,), "w2": ()})
    job.folder.slow = "bamboo_manifest.json"
    job.iterate(minutes=10)
    job.iterate()  # now w0 begins to name it, and does not come to an end
    job.lose("w0", heir="w2")
    job.iterate(wait=())
    job.folder.go.set()
    job.rounds["w0"].wait()
    assert job.latest == "bamboo_step1"
    job.folder.slow, job.folder.go = "layer_01-model_states.pt", threading.Event()
    job.iterate()
    job.iterate(minutes=10)
    taken = job.rounds["w2"].progress.step
    job.lose("w1", heir="w2")  # before its part is written
    job.iterate(wait=("w2",))
    assert job.rounds["w2"].progress.due and taken is not None
    job.folder.go.set()
    job.rounds["w1"].wait()  # what was on its way when it was lost arrives all the same
    for _ in range(4):
        job.iterate()
    assert job.latest == f"bamboo_step{taken + 2}"
    assert f"bamboo_step{taken}" not in job.folder.folders()
    job.check_whole()


def test_a_writer_that_hangs_is_given_up_named_and_held_against_nobody() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    job.folder.slow = "layer_01-model_states.pt"
    job.iterate(minutes=10)
    for _ in range(4):
        job.iterate(minutes=7, wait=("w0",))
    assert job.rounds["w0"].progress.step == 1
    assert any(
        "no checkpoint was completed for 24 minutes; the last good one is none" in t for t in job.workers["w0"].told
    )
    job.iterate(minutes=7, wait=("w0",))
    assert any(
        "it took too long; w1 did not write 0.1 (pipeline.stage) in time" in text for text in job.workers["w0"].told
    )
    for _ in range(4):
        job.iterate(minutes=10, wait=("w0",))  # w1 would need memory for two copies
    assert job.rounds["w0"].progress.idle
    assert "w1 still writes that of step 1" in job.workers["w0"].told[-1]
    # Its stage moves: it has nothing to copy any more, and what it still writes is in nobody's way.
    job.workers["w0"].owned, job.workers["w1"].owned = (FIRST, SECOND), ()
    job.folder.slow = ""
    for _ in range(4):
        job.iterate(wait=("w0",))
    job.folder.go.set()
    step = job.rounds["w0"].progress.kept[-1]
    assert job.latest == f"bamboo_step{step}" and step > 9
    job.check_whole()


def test_it_is_said_why_older_ones_stay() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    for _ in range(6):
        job.iterate(minutes=10)
    assert job.latest == "bamboo_step4"
    job.folder.remove_file("bamboo_step4/layer_01-model_states.pt")
    for _ in range(4):
        job.iterate(minutes=10)
    assert job.latest == "bamboo_step7" and "bamboo_step1" in job.folder.folders()
    assert "older checkpoints are not removed: bamboo_step4 in place is not whole any more, so bamboo_step1 stays" in (
        job.workers["w0"].told
    )


def test_a_full_disk_is_told_and_tried_again_an_interval_later() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    job.folder.full = True
    job.iterate(minutes=10)
    job.iterate()
    assert job.workers["w0"].told == [
        "a checkpoint could not be written: w0, w1: no room. The last complete one is none; the next one is due 10 "
        "minutes after this one (bamboo.checkpoint.interval_minutes)"
    ]
    job.folder.full = False
    job.iterate(minutes=5)
    assert job.rounds["w0"].progress.idle
    job.iterate(minutes=5)
    job.iterate()
    job.iterate()
    assert job.latest == "bamboo_step4"
    job.check_whole()


@pytest.mark.parametrize("minutes", [5.0, 25.0])
def test_age_of_the_last_good_one(minutes: float) -> None:
    """Nobody takes one: w0, which would, is not asked. Two intervals are twenty minutes."""
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    job.folder.slow = "layer_00-model_states.pt"
    job.iterate(minutes=10)
    job.iterate(minutes=minutes - 10, wait=())
    overdue = [fields for action, fields in job.workers["w1"].events if action == "overdue"]
    assert len(overdue) == (1 if minutes > 20 else 0)
    job.iterate(minutes=1, wait=())
    assert len([1 for action, _ in job.workers["w1"].events if action == "overdue"]) == len(overdue)  # told once
    job.folder.go.set()


def go_back(job: Job, step: int) -> None:
    """The script loads a state of its own, that after ``step`` steps."""
    job.step = step
    for name in job.members:
        job.rounds[name].go_back(step)


@pytest.mark.parametrize("joins", [False, True])
def test_after_the_script_went_back_new_checkpoints_count_from_the_first_one(joins: bool) -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    for _ in range(9):
        job.iterate(minutes=10)
    assert job.latest == "bamboo_step7" and job.rounds["w1"].progress.kept == (4, 7)
    go_back(job, 2)
    assert job.rounds["w0"].last_good() == "that of step 7", "a job that starts goes on from there"
    if joins:
        job.add("w2")
        job.lose("w0", heir="w2")
    job.iterate(minutes=10)
    assert job.latest == "bamboo_step7" and job.rounds["w1"].progress.step == 3
    for _ in range(2):
        job.iterate()
    assert job.latest == "bamboo_step3" and job.rounds["w1"].progress.kept == (3,)
    assert job.rounds["w1"].last_good() == "that of step 3"
    assert job.workers[job.members[0]].told[-1].startswith("checkpoint of step 3 is in place")
    job.check_whole()
    for _ in range(9):
        job.iterate(minutes=10)
    assert job.rounds["w1"].progress.kept == (9, 12) and "bamboo_step7" not in job.folder.folders()
    job.check_whole()


def test_a_whole_checkpoint_of_before_the_script_went_back_is_not_written_over() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    for _ in range(9):
        job.iterate(minutes=10)
    go_back(job, 6)
    job.iterate(minutes=10)
    assert job.rounds["w0"].progress.step is None and job.step == 7
    job.check_whole()
    job.iterate()
    assert job.rounds["w0"].progress.step == 8


def test_one_that_was_being_written_when_the_script_went_back_is_removed_and_the_next_is_due() -> None:
    job = Job({"w0": (FIRST,), "w1": (SECOND,)})
    for _ in range(3):
        job.iterate(minutes=10)
    job.folder.slow = "layer_01-model_states.pt"
    job.iterate(minutes=10)
    assert job.rounds["w0"].progress.step == 4
    go_back(job, 1)
    for _ in range(3):
        job.iterate(wait=("w0",))  # w1 still writes what was given up
    assert job.rounds["w0"].progress.step is None and job.rounds["w0"].progress.due
    job.folder.go.set()
    for _ in range(4):
        job.iterate()
    assert job.latest == "bamboo_step5" and job.rounds["w1"].progress.kept == (1, 5)
    assert job.folder.folders() == ["bamboo_step1", "bamboo_step5"]
    job.check_whole()
