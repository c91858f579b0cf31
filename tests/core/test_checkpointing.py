"""How far a checkpoint is, over every order in which workers write, fail, come, go, stand by and vanish."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.checkpointing import (
    CheckpointNote,
    CheckpointProgress,
    FileFact,
    Part,
    is_overdue,
    newest,
    removable,
)
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.roles import collector, proposer, reporter

GRID = Grid(2, 2)
KEEP = 2
QUIET = CheckpointNote()
ALL = tuple(GRID)


def fact_of(step: int, coordinate: Coordinate) -> FileFact:
    return FileFact(step, f"{step}/{coordinate}")


@dataclass
class Worker:
    """As a worker behaves: copies at the boundary, writes some iterations later, names as the reporter."""

    progress: CheckpointProgress
    owned: tuple[Coordinate, ...] = ()
    to_take: int | None = None
    took: Part | None = None
    writing: Part | None = None
    written: Part | None = None
    naming: int | None = None
    named: int | None = None
    failure: tuple[int, str] | None = None
    hangs: bool = False

    def note(self, *, reports: bool, step: int, impatient: bool) -> CheckpointNote:
        return CheckpointNote(
            take=step if reports and self.progress.idle else None,
            took=self.took,
            written=self.written,
            named=self.named,
            failure=self.failure,
            give_up=self.progress.current if reports and impatient else None,
            busy=self.writing.step if self.writing and self.writing.step != self.progress.step and self.owned else None,
        )

    def after(self, notes: dict[str, CheckpointNote], own: str) -> None:
        before = self.progress
        self.progress = before.after(notes, grid=GRID, keep=KEEP)
        self.took = None if notes[own].took else self.took
        self.written = None if notes[own].written else self.written
        self.named = None if notes[own].named else self.named
        self.failure = None if notes[own].failure else self.failure
        if self.progress.step is not None and self.progress.step != before.step:
            self.to_take = self.progress.step

    def take(self) -> None:
        if self.to_take is not None:
            self.took = Part(self.to_take, self.owned)
            self.writing = self.took if self.owned else None
            self.to_take = None


@dataclass
class Job:
    """Workers in the order of the epoch, who between them own the grid, and the folder that they write to."""

    members: dict[str, Worker] = field(default_factory=dict)
    born: int = 0
    step: int = 0
    disk: dict[int, set[Coordinate]] = field(default_factory=dict)
    latest: list[int] = field(default_factory=list)

    def join(self) -> None:
        others = list(self.members.values())
        welcome = others[0].progress if others else CheckpointProgress()
        welcome = CheckpointProgress.from_json(json.loads(json.dumps(welcome.to_json())))
        self.members[f"w{self.born}"] = Worker(welcome)
        self.born += 1

    def share_out(self, chance: Random, *, standing_by: set[str]) -> None:
        able = [name for name in self.members if name not in standing_by] or list(self.members)
        owners = {coordinate: chance.choice(able) for coordinate in GRID}
        for name, worker in self.members.items():
            worker.owned = tuple(c for c, owner in owners.items() if owner == name)

    def iterate(self, *, impatient: bool, lost: str | None = None) -> None:
        """One iteration. ``lost`` vanishes after the agreement, some of the others having ended the iteration."""
        self.step += 1
        first = reporter(list(self.members))
        notes = {
            name: worker.note(reports=name == first, step=self.step, impatient=impatient)
            for name, worker in self.members.items()
        }
        notes = {name: CheckpointNote.from_json(json.loads(json.dumps(note.to_json()))) for name, note in notes.items()}
        for name, worker in self.members.items():
            worker.after(notes, name)
        progress = {repr(worker.progress) for worker in self.members.values()}
        assert len(progress) == 1, progress
        if lost is not None:
            gone = self.members.pop(lost)
            heir = next(iter(self.members.values()))
            heir.owned = (*heir.owned, *gone.owned)
        for worker in self.members.values():
            worker.take()

    def write(self, name: str, *, fails: bool = False) -> None:
        worker = self.members[name]
        part, worker.writing = worker.writing, None
        if part is None:
            return
        if fails:
            worker.failure = (part.step, "disk full")
            return
        self.disk.setdefault(part.step, set()).update(part.coordinates)
        worker.written = replace(part, files={f"{c}": fact_of(part.step, c) for c in part.coordinates})

    def name(self) -> None:
        first = reporter(list(self.members))
        worker = self.members[first]
        step = worker.progress.complete
        if step is None:
            return
        assert self.disk[step] >= set(GRID), "the named checkpoint lacks a part"
        assert worker.progress.files == {str(c): fact_of(step, c) for c in GRID}
        self.latest.append(step)
        worker.named = step


EVENTS = ["", "", "join", "drain first", "drain", "lose first", "lose", "move", "hang", "first stands by"]


# One draw of a seed, since to draw every event would take ten times as long as what happens.
@settings(max_examples=300)
@given(st.randoms(use_true_random=True))
def test_rounds_with_joiners_standbys_drains_and_losses_never_block_and_name_whole_ones(chance: Random) -> None:
    job, standing_by = Job(), set()
    for _ in range(chance.randint(1, 4)):
        job.join()
    job.share_out(chance, standing_by=set())
    for _ in range(chance.randint(1, 25)):
        names = list(job.members)
        event = chance.choice(EVENTS)
        lost = None
        if event == "join":
            job.join()  # it owns nothing yet
        elif event in ("drain first", "drain") and len(names) > 1:
            gone = job.members.pop(names[0] if event == "drain first" else chance.choice(names))
            heir = job.members[chance.choice(list(job.members))]
            heir.owned = (*heir.owned, *gone.owned)
        elif event in ("lose first", "lose") and len(names) > 1:
            lost = names[0] if event == "lose first" else chance.choice(names)
        elif event == "first stands by":
            standing_by = {names[0]}
            job.share_out(chance, standing_by=standing_by)
        elif event == "move":
            job.share_out(chance, standing_by=set())
        elif event == "hang":
            job.members[chance.choice(names)].hangs = True
        job.iterate(impatient=chance.random() < 1 / 6, lost=lost)
        for name, worker in job.members.items():
            if not worker.hangs and chance.random() < 1 / 2:
                job.write(name, fails=chance.random() < 1 / 10)
        if chance.random() < 1 / 2:
            job.name()
    # Whatever happened: once nobody hangs, a checkpoint of a later step is named within a few iterations.
    before = job.step
    for worker in job.members.values():
        worker.hangs = False
    for _ in range(8):
        for name in job.members:
            job.write(name)
        job.name()
        job.iterate(impatient=False)
    assert max(job.latest) > before
    assert job.members[reporter(list(job.members))].progress.kept == newest(job.latest, keep=KEEP)


def test_a_worker_that_hangs_and_owns_nothing_any_more_holds_nobody_up() -> None:
    job = Job()
    for _ in range(2):
        job.join()
    job.members["w0"].owned = ALL[:2]
    job.members["w1"].owned = ALL[2:]
    job.iterate(impatient=False)
    job.write("w0")
    for _ in range(3):
        job.iterate(impatient=False)
    stuck = job.members["w0"].progress
    assert stuck.step == 1 and set(stuck.missing or {}) == set(ALL[2:]) and job.latest == []
    job.iterate(impatient=True)  # the reporter has waited for long enough
    failure = job.members["w0"].progress.failure
    assert failure == "it took too long; w1 did not write 1.0 1.1 (pipeline.stage) in time"
    job.iterate(impatient=False)
    assert job.members["w0"].progress.idle  # two copies may be too much for w1's memory
    job.members["w0"].owned, job.members["w1"].owned = ALL, ()
    for _ in range(4):
        job.iterate(impatient=False)
        job.write("w0")
        job.name()
    assert job.latest and min(job.latest) > 1


def one_round(**more: CheckpointNote) -> CheckpointProgress:
    """A checkpoint of step 1 that w0 and w1 write, two stages each."""
    taken = CheckpointProgress(kept=(0,)).after({"w0": CheckpointNote(take=1), "w1": QUIET}, grid=GRID, keep=KEEP)
    took = {"w0": CheckpointNote(took=Part(1, ALL[:2])), "w1": CheckpointNote(took=Part(1, ALL[2:]))}
    return taken.after({**took, **more}, grid=GRID, keep=KEEP)


def test_a_failure_gives_the_checkpoint_up_and_is_told_once() -> None:
    full = CheckpointNote(failure=(1, "full"))
    failed = one_round().after({"w0": full, "w1": full}, grid=GRID, keep=KEEP)
    assert failed == CheckpointProgress(failure="w0, w1: full", kept=(0,))
    assert failed.after({"w0": QUIET, "w1": QUIET}, grid=GRID, keep=KEEP) == CheckpointProgress(kept=(0,))
    old = CheckpointNote(failure=(0, "full"))  # of a round that was given up already
    assert one_round().after({"w0": old, "w1": QUIET}, grid=GRID, keep=KEEP) == one_round()


def test_a_part_that_nobody_has_copied_or_whose_worker_is_lost_makes_the_next_one_due() -> None:
    taken = CheckpointProgress().after({"w0": CheckpointNote(take=1), "w1": QUIET}, grid=GRID, keep=KEEP)
    copied = CheckpointNote(took=Part(1, ALL[:2]))
    assert taken.after({"w0": copied}, grid=GRID, keep=KEEP) == CheckpointProgress(due=True)
    assert one_round().after({"w0": QUIET}, grid=GRID, keep=KEEP) == CheckpointProgress(due=True, kept=(0,))
    # What it wrote before it was lost counts.
    half = one_round().after({"w0": QUIET, "w1": CheckpointNote(written=Part(1, ALL[2:]))}, grid=GRID, keep=KEEP)
    whole = half.after({"w0": CheckpointNote(written=Part(1, ALL[:2]))}, grid=GRID, keep=KEEP)
    assert whole.complete == 1 and not whole.idle
    assert whole.after({"w0": CheckpointNote(named=1)}, grid=GRID, keep=KEEP) == CheckpointProgress(kept=(0, 1))


def test_what_was_written_of_an_earlier_one_does_not_count() -> None:
    late = one_round().after({"w0": CheckpointNote(written=Part(0, ALL)), "w1": QUIET}, grid=GRID, keep=KEEP)
    assert late == one_round()


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 4))
def test_only_older_ones_go_and_only_once_enough_are_whole(there: set[int], whole: set[int], keep: int) -> None:
    gone = removable(there, kept=whole, keep=keep)
    assert set(gone) <= there
    if len(whole) < keep:
        assert gone == ()
    else:
        assert not set(gone) & set(newest(whole, keep=keep)) and all(step < max(whole) for step in gone)
        assert {step for step in there if step < max(whole)} - set(gone) <= set(newest(whole, keep=keep))


def test_a_damaged_one_does_not_count_as_one_that_is_kept() -> None:
    """Or the last good one would go in its place."""
    progress = CheckpointProgress(kept=(20, 30)).without([30, 7])
    assert progress.kept == (20,)
    progress = replace(progress, complete=40).after({"a": CheckpointNote(named=40)}, grid=Grid(1, 1), keep=2)
    assert progress.kept == (20, 40)
    assert removable((10, 20, 30, 40), kept=progress.kept, keep=2) == (10, 30)
    assert removable((10, 20, 30, 40), kept=(40,), keep=2) == ()


def test_overdue_is_more_than_two_intervals() -> None:
    assert [is_overdue(age, interval_seconds=10.0) for age in (0, 19.9, 20.1)] == [False, False, True]


@given(st.lists(st.integers(0, 99), min_size=1, unique=True), st.data())
def test_a_role_moves_only_when_its_worker_goes(numbers: list[int], data: st.DataObject) -> None:
    members = [f"w{number}" for number in numbers]
    for role in (reporter, collector, proposer):
        holder = role(members)
        assert holder in members and role([*members, "late"]) == holder
        lost = data.draw(st.sampled_from(members))
        left = [worker for worker in members if worker != lost]
        if left and lost != holder:
            assert role(left) == holder


def test_after_an_earlier_state_was_loaded_later_checkpoints_count_no_more() -> None:
    before = CheckpointProgress(kept=(10, 20, 30))
    assert before.gone_back(30) == before and before.gone_back(31) == before
    back = before.gone_back(15)
    assert back == CheckpointProgress(kept=(10,), over=(20, 30))
    assert back.gone_back(5) == CheckpointProgress(over=(10, 20, 30))
    assert CheckpointProgress.from_json(json.loads(json.dumps(back.to_json()))) == back
    written = CheckpointProgress(complete=17, kept=(10,), over=(20, 30))
    named = written.after({"w0": CheckpointNote(named=17)}, grid=GRID, keep=2)
    assert named == CheckpointProgress(kept=(10, 17))
    assert removable([10, 17, 20, 30], kept=named.kept, keep=2) == ()


def test_one_that_is_being_written_when_an_earlier_state_is_loaded_is_given_up() -> None:
    writing = CheckpointProgress(step=30, missing={ALL[0]: "w0"}, kept=(10, 20))
    assert writing.gone_back(15) == CheckpointProgress(kept=(10,), over=(20,), due=True)
    assert writing.gone_back(30) == writing
    assert CheckpointProgress(complete=30, kept=(10, 20)).gone_back(25) == CheckpointProgress(
        kept=(10, 20), over=(30,), due=True
    )
