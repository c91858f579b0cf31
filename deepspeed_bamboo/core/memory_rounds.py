"""How far a memory checkpoint is: a value that all workers derive from the same notes, as with those on disk.

The leader's note in an agreement names a step. At that boundary each worker copies the stages that it owns or shadows
into its host memory, and beside the next iterations copies of what it owns go to other workers. Whoever has all that it
is to keep says so; once all have, the checkpoint is complete, and an older one is let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_bamboo.core.placement import WorkerId

_KEPT = 2


@dataclass(frozen=True)
class MemoryNote:
    """What one worker has to say in one iteration.

    ``take``: the step to which this iteration leads; only the leader says so. ``kept``: it has all that it keeps of the
    checkpoint of that step. ``failed``: it can't keep that.
    """

    take: int | None = None
    kept: int | None = None
    failed: int | None = None

    def to_plain(self) -> list[int | None]:
        """As values that can be sent."""
        return [self.take, self.kept, self.failed]

    @classmethod
    def from_plain(cls, value: Any) -> MemoryNote:
        """Inverse of :meth:`to_plain`."""
        return cls(*value)


@dataclass(frozen=True)
class MemoryProgress:
    """``step``: of the checkpoint that is being made, if any; ``waiting``: who has not got its part of it yet.

    ``complete``: the steps of the last ones that are complete, in order. ``due``: the next one is to be made at once.
    """

    step: int | None = None
    waiting: frozenset[WorkerId] = frozenset()
    complete: tuple[int, ...] = ()
    due: bool = False

    @property
    def wanted(self) -> tuple[int, ...]:
        """The steps of which copies are kept: two, so that memory is bounded. The last complete one always is."""
        return self.complete[-_KEPT:] if self.step is None else (*self.complete[-_KEPT + 1 :], self.step)

    def after(self, notes: Mapping[WorkerId, MemoryNote]) -> MemoryProgress:
        """Where it is after an iteration in which its workers handed in ``notes`` (empty ones included).

        One whose worker is lost before it has its part is given up, and the next one is due at once.
        """
        now = self._kept(notes)
        steps = [note.take for note in notes.values() if note.take is not None]
        if now.step is None and steps:
            return replace(now, step=max(steps), waiting=frozenset(notes), due=False)
        return now

    def _kept(self, notes: Mapping[WorkerId, MemoryNote]) -> MemoryProgress:
        if self.step is None:
            return self
        if any(note.failed == self.step for note in notes.values()):
            return replace(self, step=None, waiting=frozenset(), due=False)
        if not self.waiting <= notes.keys():
            return replace(self, step=None, waiting=frozenset(), due=True)
        waiting = frozenset(worker for worker in self.waiting if notes[worker].kept != self.step)
        if waiting:
            return replace(self, waiting=waiting)
        return MemoryProgress(complete=(*self.complete, self.step)[-_KEPT:])

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal, for a worker that joins."""
        return {
            "step": self.step,
            "waiting": sorted(self.waiting),
            "complete": list(self.complete),
            "due": self.due,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MemoryProgress:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        waiting, complete = frozenset(value["waiting"]), tuple(map(int, value["complete"]))
        return cls(value["step"], waiting, complete, bool(value["due"]))
