"""How far a checkpoint is that workers write beside training: a value that all of them derive from the same notes.

A checkpoint is taken at one boundary, by whoever owns the coordinates there, and is complete when all of them are
written. Notes travel with the agreement of each iteration, so all workers know the same. A part whose worker is lost
before it was written is gone: the checkpoint is given up, and the next one is due at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId


@dataclass(frozen=True)
class CheckpointNote:
    """What one worker has to say about checkpoints in one iteration.

    ``take``: what the iteration leads to is to be kept. ``written``: the step of a checkpoint, and which of its
    coordinates this worker has written. ``named``: the step of the one that is now the last one. ``failure``: why
    something could not be written; empty: nothing went wrong.
    """

    take: bool = False
    written: tuple[int, tuple[Coordinate, ...]] | None = None
    named: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class CheckpointProgress:
    """``step``: of the checkpoint that is being written, if any; ``missing``: its coordinates, and who writes them.

    ``complete``: the step of one that is written and still has to be named as the last one. ``due``: one is to be
    taken at once. ``failure``: why one was given up just now.
    """

    step: int | None = None
    missing: Mapping[Coordinate, WorkerId] = field(default_factory=dict)
    complete: int | None = None
    due: bool = False
    failure: str = ""

    @property
    def idle(self) -> bool:
        """True when there is nothing that the next checkpoint would have to wait for."""
        return self.step is None and self.complete is None

    def after(
        self, notes: Mapping[WorkerId, CheckpointNote], *, step: int, owners: Mapping[Coordinate, WorkerId]
    ) -> CheckpointProgress:
        """Where it is after an iteration in which its workers handed in ``notes`` (empty ones included).

        ``step`` is how many steps are done then, ``owners`` who owns what.
        """
        now = replace(self._heard(notes), failure="")
        failures = _by_reason(notes)
        if failures:
            now = CheckpointProgress(failure="; ".join(failures))
        if now.idle and any(note.take for note in notes.values()):
            return replace(now, step=step, missing=dict(owners), due=False)
        return now

    def _heard(self, notes: Mapping[WorkerId, CheckpointNote]) -> CheckpointProgress:
        complete = self.complete
        if any(note.named is not None and note.named == complete for note in notes.values()):
            complete = None
        if self.step is None:
            return replace(self, complete=complete)
        parts = [note.written[1] for note in notes.values() if note.written and note.written[0] == self.step]
        written = {coordinate for part in parts for coordinate in part}
        missing = {c: worker for c, worker in self.missing.items() if c not in written}
        if not missing:
            return replace(self, step=None, missing={}, complete=self.step)
        if any(worker not in notes for worker in missing.values()):
            return replace(self, step=None, missing={}, complete=complete, due=True)
        return replace(self, missing=missing, complete=complete)


def _by_reason(notes: Mapping[WorkerId, CheckpointNote]) -> list[str]:
    """What went wrong, and for whom: on a full disk for everybody the same."""
    workers: dict[str, list[WorkerId]] = {}
    for worker, note in sorted(notes.items()):
        if note.failure:
            workers.setdefault(note.failure, []).append(worker)
    return [f"{', '.join(names)}: {reason}" for reason, names in workers.items()]
