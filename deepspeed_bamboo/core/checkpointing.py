"""How far a checkpoint is that workers write beside training: a value that all of them derive from the same notes.

Notes travel with the agreement of each iteration. A round goes through three states, and everything that moves it is in
a note, so workers that count steps differently or finish an iteration on both sides of a loss still agree:

1. taken: the reporter's note names the step. Each worker copies what it owns at that boundary;
2. writing: in the next iteration each worker says what it has copied. A coordinate that no live worker has copied, or
   whose worker is lost before it was written, is gone: the round is given up, and the next one is due at once;
3. complete: all coordinates are written. The reporter (whoever that is by then) names the checkpoint.

A failure, or the reporter's word that a round takes too long, ends it as well, so no round blocks the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import WorkerId


@dataclass(frozen=True)
class FileFact:
    """What was written into a file: ``size`` in bytes, ``sha256`` in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """``coordinates`` of the checkpoint of ``step``, as copied, or as written into ``files`` (facts by file name)."""

    step: int
    coordinates: tuple[Coordinate, ...]
    files: Mapping[str, FileFact] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {"step": self.step, "coordinates": list(map(str, self.coordinates)), "files": facts_to_json(self.files)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Part:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        coordinates = tuple(map(Coordinate.parse, value["coordinates"]))
        return cls(int(value["step"]), coordinates, facts_from_json(value["files"]))


@dataclass(frozen=True)
class CheckpointNote:
    """What one worker has to say about checkpoints in one iteration.

    ``take``: the state after so many steps, to which this iteration leads, is to be kept; only the reporter says so.
    ``took``: what this worker has copied for it; ``written``: what of that is on disk. ``named``: the step of the
    checkpoint that is now the last one. ``failure``: of which step, and why something could not be written.
    ``give_up``: the step of a round that takes too long; only the reporter says so. ``busy``: this worker owns
    something, and still writes its part of the checkpoint of that step, which was given up.
    """

    take: int | None = None
    took: Part | None = None
    written: Part | None = None
    named: int | None = None
    failure: tuple[int, str] | None = None
    give_up: int | None = None
    busy: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal; {} for an empty note."""
        value = {
            "take": self.take,
            "took": None if self.took is None else self.took.to_json(),
            "written": None if self.written is None else self.written.to_json(),
            "named": self.named,
            "failure": None if self.failure is None else list(self.failure),
            "give_up": self.give_up,
            "busy": self.busy,
        }
        return {name: part for name, part in value.items() if part is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckpointNote:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        failure = value.get("failure")
        return cls(
            take=_step_in(value, "take"),
            took=Part.from_json(value["took"]) if "took" in value else None,
            written=Part.from_json(value["written"]) if "written" in value else None,
            named=_step_in(value, "named"),
            failure=None if failure is None else (int(failure[0]), str(failure[1])),
            give_up=_step_in(value, "give_up"),
            busy=_step_in(value, "busy"),
        )


@dataclass(frozen=True)
class CheckpointProgress:
    """``step``: of the checkpoint that is being written, if any. ``missing``: its coordinates that are not written yet,
    and who writes them; None until that is known. ``files``: what is written of it, or of the complete one.

    ``complete``: the step of one that is written and still has to be named as the last one. ``due``: one is to be
    taken at once. ``failure``: why one was given up just now. ``kept``: the steps of the newest checkpoints that are
    known to be whole, in order. ``over``: those that were, and are of later steps than the one that training has gone
    back to since; a job that starts takes the last of them until another is named.
    """

    step: int | None = None
    missing: Mapping[Coordinate, WorkerId] | None = None
    files: Mapping[str, FileFact] = field(default_factory=dict)
    complete: int | None = None
    due: bool = False
    failure: str = ""
    kept: tuple[int, ...] = ()
    over: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """True when there is nothing that the next checkpoint would have to wait for."""
        return self.step is None and self.complete is None

    @property
    def current(self) -> int | None:
        """The step of the checkpoint that is being written or waits for its name."""
        return self.complete if self.step is None else self.step

    def after(self, notes: Mapping[WorkerId, CheckpointNote], *, grid: Grid, keep: int) -> CheckpointProgress:
        """Where it is after an iteration in which its workers handed in ``notes`` (empty ones included).

        ``keep`` is how many checkpoints are kept. None is taken while somebody who would have to copy a stage has not
        written its part of an earlier one: two copies may not fit into its memory.
        """
        now = replace(self, failure="")._named(notes, keep=keep)._written(notes, grid)._unless_it_failed(notes)
        steps = [note.take for note in notes.values() if note.take is not None]
        if now.idle and steps and all(note.busy is None for note in notes.values()):
            return replace(now, step=max(steps), missing=None, files={}, due=False)
        return now

    def without(self, steps: Iterable[int]) -> CheckpointProgress:
        """When the checkpoints of ``steps`` have turned out to be damaged: they are not known to be whole any more."""
        gone = frozenset(steps)
        return replace(self, kept=tuple(step for step in self.kept if step not in gone))

    def gone_back(self, step: int) -> CheckpointProgress:
        """When the script has loaded an earlier state, that after ``step`` steps: later checkpoints count no more.

        One that is being written is given up, and the next is due at once.
        """
        late = (*self.kept, *(() if self.complete is None else (self.complete,)))
        over = tuple(sorted({*self.over, *(its for its in late if its > step)}))
        if self.current is None or self.current <= step:
            return replace(self, kept=tuple(its for its in self.kept if its <= step), over=over)
        return replace(self._given_up(due=True), kept=tuple(its for its in self.kept if its <= step), over=over)

    def _named(self, notes: Mapping[WorkerId, CheckpointNote], *, keep: int) -> CheckpointProgress:
        if self.complete is None or all(note.named != self.complete for note in notes.values()):
            return self
        return replace(self, complete=None, files={}, kept=newest((*self.kept, self.complete), keep=keep), over=())

    def _written(self, notes: Mapping[WorkerId, CheckpointNote], grid: Grid) -> CheckpointProgress:
        if self.step is None:
            return self
        missing = self.missing
        if missing is None:
            copied = {w: note.took for w, note in notes.items() if note.took and note.took.step == self.step}
            missing = {c: worker for worker, part in copied.items() for c in part.coordinates}
            if not missing.keys() >= set(grid):
                return self._given_up(due=True)
        written = [note.written for note in notes.values() if note.written and note.written.step == self.step]
        done = {coordinate for part in written for coordinate in part.coordinates}
        missing = {c: worker for c, worker in missing.items() if c not in done}
        files = {**self.files, **{name: fact for part in written for name, fact in part.files.items()}}
        if not missing:
            return replace(self, step=None, missing=None, files=files, complete=self.step)
        if any(worker not in notes for worker in missing.values()):
            return self._given_up(due=True)
        return replace(self, missing=missing, files=files)

    def _unless_it_failed(self, notes: Mapping[WorkerId, CheckpointNote]) -> CheckpointProgress:
        if self.current is None:
            return self
        reasons = _by_reason(notes, self.current)
        if any(note.give_up == self.current for note in notes.values()):
            reasons.append(f"it took too long; {self._waits_for()}")
        return self._given_up(failure="; ".join(reasons)) if reasons else self

    def _given_up(self, *, due: bool = False, failure: str = "") -> CheckpointProgress:
        return CheckpointProgress(due=due, failure=failure, kept=self.kept, over=self.over)

    def _waits_for(self) -> str:
        if self.step is None:
            return "its parts are written, but the file latest could not be changed in time"
        missing = self.missing or {}
        workers = sorted(set(missing.values()))
        return f"{', '.join(workers)} did not write {' '.join(map(str, sorted(missing)))} (pipeline.stage) in time"

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal, for a worker that joins."""
        missing = None if self.missing is None else {str(c): worker for c, worker in self.missing.items()}
        return {
            "step": self.step,
            "missing": missing,
            "files": facts_to_json(self.files),
            "complete": self.complete,
            "due": self.due,
            "failure": self.failure,
            "kept": list(self.kept),
            "over": list(self.over),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckpointProgress:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        missing = value["missing"]
        return cls(
            step=value["step"],
            missing=None if missing is None else {Coordinate.parse(c): worker for c, worker in missing.items()},
            files=facts_from_json(value["files"]),
            complete=value["complete"],
            due=bool(value["due"]),
            failure=str(value["failure"]),
            kept=tuple(map(int, value["kept"])),
            over=tuple(map(int, value["over"])),
        )


def newest(steps: Iterable[int], *, keep: int) -> tuple[int, ...]:
    """The ``keep`` highest of ``steps``, each once, in order."""
    return tuple(sorted(set(steps))[-keep:])


def removable(there: Iterable[int], *, kept: Iterable[int], keep: int) -> tuple[int, ...]:
    """Which checkpoints of ``there`` may go when those of ``kept`` are known to be whole, in order.

    None as long as fewer than ``keep`` are known: another one may be good. Never one that is newer than all of them.
    """
    whole = newest(kept, keep=keep)
    if len(whole) < keep:
        return ()
    return tuple(step for step in sorted(set(there)) if step < whole[-1] and step not in whole)


def is_overdue(age_seconds: float, *, interval_seconds: float) -> bool:
    """Whether the last good checkpoint is older than people should hear of: two intervals."""
    return age_seconds > 2 * interval_seconds


def facts_to_json(files: Mapping[str, FileFact]) -> dict[str, list[Any]]:
    """``files`` as ``json`` can write them."""
    return {name: [fact.size, fact.sha256] for name, fact in files.items()}


def facts_from_json(value: Mapping[str, Any]) -> dict[str, FileFact]:
    """Inverse of :func:`facts_to_json`. Raises ValueError or TypeError for anything else."""
    return {str(name): FileFact(int(size), str(sha256)) for name, (size, sha256) in value.items()}


def _step_in(value: Mapping[str, Any], name: str) -> int | None:
    return None if value.get(name) is None else int(value[name])


def _by_reason(notes: Mapping[WorkerId, CheckpointNote], step: int) -> list[str]:
    """What went wrong with the checkpoint of ``step``, and for whom: on a full disk for everybody the same."""
    workers: dict[str, list[WorkerId]] = {}
    for worker, note in sorted(notes.items()):
        if note.failure is not None and note.failure[0] == step:
            workers.setdefault(note.failure[1], []).append(worker)
    return [f"{', '.join(names)}: {reason}" for reason, names in workers.items()]
