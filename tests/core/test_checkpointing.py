"""How far a checkpoint is, over every order in which workers write, fail and vanish."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.checkpointing import CheckpointNote, CheckpointProgress
from deepspeed_bamboo.core.grid import Coordinate, Grid

GRID = Grid(2, 2)
QUIET = CheckpointNote()


def owners_of(workers: list[str]) -> dict[Coordinate, str]:
    return {coordinate: workers[place % len(workers)] for place, coordinate in enumerate(GRID)}


@given(st.data(), st.integers(1, 5))
def test_complete_means_that_every_part_was_written(data: st.DataObject, count: int) -> None:
    workers, progress = [f"w{n}" for n in range(count)], CheckpointProgress()
    owners = owners_of(workers)
    for step in range(1, 1 + data.draw(st.integers(1, 12))):
        notes = dict.fromkeys(workers, QUIET)
        if progress.idle and data.draw(st.booleans()):
            notes[workers[0]] = CheckpointNote(take=True)
        for worker in workers:
            part = tuple(c for c, owner in progress.missing.items() if owner == worker)
            if progress.step is not None and part and data.draw(st.booleans()):
                notes[worker] = replace(notes[worker], written=(progress.step, part))
        if progress.complete is not None and data.draw(st.booleans()):
            notes[workers[0]] = replace(notes[workers[0]], named=progress.complete)
        before, lost = progress, len(workers) > 1 and data.draw(st.integers(0, 4)) == 0
        if lost:
            notes.pop(workers.pop())
            owners = owners_of(workers)
        progress = before.after(notes, step=step, owners=owners)
        if before.step is not None:
            unwritten = {c for c, w in before.missing.items() if w not in notes or notes[w].written is None}
            gone = any(w not in notes for c, w in before.missing.items() if c in unwritten)
            assert (progress.complete == before.step) == (not unwritten)
            assert progress.due == gone
        elif any(note.take for note in notes.values()):
            assert progress.step == step and dict(progress.missing) == owners and not progress.due
        assert progress.step is None or progress.complete is None


@given(st.integers(1, 9), st.sampled_from(["w0", "w1"]))
def test_a_failure_gives_the_checkpoint_up_and_is_told_once(step: int, worker: str) -> None:
    owners = owners_of(["w0", "w1"])
    quiet = {"w0": QUIET, "w1": QUIET}
    taken = CheckpointProgress().after({**quiet, "w0": CheckpointNote(take=True)}, step=step, owners=owners)
    failed = taken.after({**quiet, worker: CheckpointNote(failure="disk full")}, step=step + 1, owners=owners)
    assert failed == CheckpointProgress(failure=f"{worker}: disk full")
    assert failed.after(quiet, step=step + 2, owners=owners) == CheckpointProgress()


def test_a_failure_of_everybody_is_told_once() -> None:
    owners = owners_of(["w0", "w1"])
    taken = CheckpointProgress().after({"w0": CheckpointNote(take=True), "w1": QUIET}, step=1, owners=owners)
    notes = {"w0": CheckpointNote(failure="full"), "w1": CheckpointNote(failure="full")}
    assert taken.after(notes, step=2, owners=owners).failure == "w0, w1: full"


def test_what_was_written_of_an_earlier_one_does_not_count() -> None:
    owners = owners_of(["w0"])
    taken = CheckpointProgress().after({"w0": CheckpointNote(take=True)}, step=5, owners=owners)
    late = taken.after({"w0": CheckpointNote(written=(3, tuple(owners)))}, step=6, owners=owners)
    assert late == taken
    whole = late.after({"w0": CheckpointNote(written=(5, tuple(owners)))}, step=7, owners=owners)
    assert whole.complete == 5 and not whole.idle
    assert whole.after({"w0": CheckpointNote(named=5)}, step=8, owners=owners) == CheckpointProgress()
