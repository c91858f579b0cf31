"""One worker's part in the checkpoints that are written beside training.

At an iteration boundary each worker copies the stages that it owns into host memory, in DeepSpeed's own files, and a
thread writes and hashes them while training continues. The agreements of iterations say which boundary it is, and when
all parts are there (``core/checkpointing.py``). Then the reporter writes the manifest and changes the file ``latest``.
So that file always names a whole checkpoint, and a worker that is cut off from the others never changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Protocol

from deepspeed_bamboo.core.checkpointing import CheckpointNote, CheckpointProgress, FileFact, Part, is_overdue
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.background import BackgroundWriter, Facts
from deepspeed_bamboo.storage.folders import Fill
from deepspeed_bamboo.storage.manifest import Manifest
from deepspeed_bamboo.storage.place import CheckpointPlace, tag_of

NOTE = "checkpoint"
"""The key of a worker's note in what it contributes to an agreement."""

# A round that takes longer than so many intervals, and this long, is given up.
_PATIENCE_INTERVALS, _PATIENCE_SECONDS = 3.0, 600.0
# With an interval of seconds a checkpoint may take as long as two of them, and that is nothing to warn of.
_LEAST_OVERDUE_SECONDS = 10.0


class Copier(Protocol):
    """What a worker's rounds have to know of it, and what they have it do."""

    @property
    def worker(self) -> WorkerId:
        """Its name."""

    @property
    def is_reporter(self) -> bool:
        """Whether it is the one that takes and names checkpoints for all."""

    @property
    def owned(self) -> tuple[Coordinate, ...]:
        """What it owns now."""

    def copy(self, coordinate: Coordinate, *, step: int) -> dict[str, Fill]:
        """The files of ``coordinate`` in the checkpoint of ``step``, from a copy in host memory.

        Raises CheckpointError for lack of memory.
        """

    def tell(self, text: str) -> None:
        """Tell the person who watches; each worker calls it, one of them prints."""

    def warn(self, text: str) -> None:
        """Tell it from this worker, whoever prints for all."""

    def log(self, action: str, **fields: Any) -> None:
        """Write the event ``checkpoint`` to the event log."""


class CheckpointRounds:
    """See the module. Everything but :meth:`contribution` is called between iterations."""

    def __init__(
        self,
        copier: Copier,
        *,
        place: CheckpointPlace,
        grid: Grid,
        interval_seconds: float,
        keep: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copier = copier
        self._place = place
        self._grid = grid
        self._keep = keep
        self._clock = clock
        self.interval_seconds = interval_seconds
        self._writer = BackgroundWriter(place.write)
        self.progress = CheckpointProgress()
        self._taken_at = self._good_at = clock()
        self._warned_at: float | None = None
        self._discarded: set[int] = set()
        self._to_take: int | None = None
        self._took: Part | None = None
        self._busy: dict[WorkerId, int] = {}
        self._naming: int | None = None  # handed to the writer, and not heard of again
        # Told by the writer's thread, until everybody knows.
        self._writing: int | None = None
        self._written: Part | None = None
        self._named: int | None = None
        self._failure: tuple[int, str] | None = None
        self._not_removed = ""

    # -- with each iteration -----------------------------------------------------------------------

    def contribution(self, *, step: int) -> dict[str, Any]:
        """What this worker contributes to the agreement of the iteration that leads to ``step``."""
        # Looked at before what is written: once nothing is being written, all that was is told.
        busy = self._writing if self._writing != self.progress.step and self._copier.owned else None
        # A whole checkpoint of before the script went back is not written over; the next step has another folder.
        due = self._is_due() and step not in self.progress.over
        note = CheckpointNote(
            take=step if self._copier.is_reporter and due else None,
            took=self._took,
            written=self._written,
            named=self._named,
            failure=self._failure,
            give_up=self.progress.current if self._copier.is_reporter and self._is_late() else None,
            busy=busy,
        )
        return {NOTE: note} if note != CheckpointNote() else {}

    def note(self, agreed: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """After an iteration: take in what all have handed in, and do what follows from it."""
        notes = {worker: value.get(NOTE, CheckpointNote()) for worker, value in agreed.items()}
        self._forget_told(notes.get(self._copier.worker, CheckpointNote()))
        before, now = self.progress, self.progress.after(notes, grid=self._grid, keep=self._keep)
        self.progress = now
        self._busy = {worker: note.busy for worker, note in notes.items() if note.busy is not None}
        if before.step is not None and before.step != now.current:
            self._discarded.add(before.step)
            self._discard(frozenset({before.step}))
        if now.step is not None and now.step != before.step:
            self._to_take = now.step
        if now.failure:
            self._naming = None
            self._tell_failure(now.failure)
        elif before.complete is not None and before.complete in now.kept and now.complete is None:
            self.on_named(before.complete)
        if now.complete is not None and self._copier.is_reporter and self._naming != now.complete:
            self._naming = now.complete
            self._begin_to_name(now.complete, now.files)
        self._warn_if_overdue()

    def take_if_due(self) -> None:
        """At the boundary after an iteration: copy what this worker owns, and begin to write it."""
        step, self._to_take = self._to_take, None
        if step is None:
            return
        self._taken_at, started = self._clock(), time.perf_counter()
        self._discard(frozenset(self._discarded - {step}))  # others may have gone on writing what was given up
        self._discarded = set()
        owned = self._copier.owned
        self._took = Part(step, owned)
        try:
            files = {name: fill for c in owned for name, fill in self._copier.copy(c, step=step).items()}
        except CheckpointError as error:
            self._failure = (step, str(error))
            return
        self._copier.log("taken", seconds=time.perf_counter() - started)
        if owned:
            self._write(step, owned, files)

    def wait(self) -> None:
        """Wait until this worker has written what it began, or has failed; the next iteration tells the others."""
        self._writer.wait()

    def is_quiet(self) -> bool:
        """Wait until this worker writes nothing any more; False if that takes longer than a round may."""
        return self._writer.wait(timeout_seconds=self._patience_seconds)

    # -- for who joins -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know, as a value that ``json`` can write."""
        now = self._clock()
        ages = {"taken_seconds": now - self._taken_at, "good_seconds": now - self._good_at}
        return {"progress": self.progress.to_json(), **ages}

    def take(self, value: Mapping[str, Any]) -> None:
        """On a worker that joins: continue from the reporter's :meth:`to_json`."""
        self.progress = CheckpointProgress.from_json(value["progress"])
        self._taken_at = self._clock() - float(value["taken_seconds"])
        self._good_at = self._clock() - float(value["good_seconds"])

    def begin_last(self) -> None:
        """The job has ended, and its last state is about to be written."""
        self._taken_at = self._clock()

    def start_from(self, kept: tuple[int, ...]) -> None:
        """At the start of a job: the checkpoints of these steps are whole, and the job continues from the last one."""
        self.progress = CheckpointProgress(kept=kept)
        self._taken_at = self._good_at = self._clock()

    def distrust(self, steps: Iterable[int]) -> None:
        """The checkpoints of ``steps`` are damaged. They count for nothing when older ones are removed."""
        self.progress = self.progress.without(steps)

    def go_back(self, step: int) -> None:
        """The script has loaded an earlier state, that after ``step`` steps; on all workers, between iterations."""
        before, self.progress = self.progress, self.progress.gone_back(step)
        if before.current != self.progress.current:
            self._to_take = self._took = self._written = self._named = self._failure = self._naming = None
        if before.step is not None and self.progress.step is None:
            self._discarded.add(before.step)
            self._discard(frozenset({before.step}))

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _patience_seconds(self) -> float:
        return max(_PATIENCE_INTERVALS * self.interval_seconds, _PATIENCE_SECONDS)

    def _is_due(self) -> bool:
        if not self.progress.idle:
            return False
        return self.progress.due or self._clock() - self._taken_at >= self.interval_seconds

    def _is_late(self) -> bool:
        return not self.progress.idle and self._clock() - self._taken_at > self._patience_seconds

    def _write(self, step: int, owned: tuple[Coordinate, ...], files: Mapping[str, Fill]) -> None:
        self._writing = step

        def done(failure: str, facts: Facts) -> None:
            if failure:
                self._failure = (step, failure)
            else:
                self._written = Part(step, owned, {PurePosixPath(name).name: fact for name, fact in facts.items()})
            self._writing = None

        self._writer.write(files, wanted=lambda: self.progress.current == step, done=done)

    def _begin_to_name(self, step: int, files: Mapping[str, FileFact]) -> None:
        manifest, kept, over = self.manifest(step, files), self.progress.kept, self.progress.over

        def name() -> None:
            self._not_removed = self._place.name_last(manifest, kept=kept, keep=self._keep, over=over)

        def done(failure: str) -> None:
            if failure:
                self._failure = (step, failure)
            else:
                self._named = step

        self._writer.call(name, done=done)

    def manifest(self, step: int, files: Mapping[str, FileFact], *, digest: str | None = None) -> Manifest:
        """Of the checkpoint of ``step``, all of whose files are in ``files``."""
        return Manifest(tag_of(step), step, (self._grid.pipelines, self._grid.stages), files, digest=digest)

    def _discard(self, steps: frozenset[int]) -> None:
        """As the reporter: remove what there is of checkpoints that were given up. What can't be removed stays."""
        if steps and self._copier.is_reporter:
            self._writer.call(lambda: self._place.discard(steps), done=lambda failure: None)

    def _forget_told(self, own: CheckpointNote) -> None:
        """What everybody has heard of need not be said again."""
        if own.took is not None and own.took == self._took:
            self._took = None
        if own.written is not None and own.written == self._written:
            self._written = None
        if own.named is not None and own.named == self._named:
            self._named = None
        if own.failure is not None and own.failure == self._failure:
            self._failure = None

    def on_named(self, step: int) -> None:
        """The checkpoint of ``step`` is the last one now, and whole."""
        now, self._naming = self._clock(), None
        seconds, self._good_at, self._warned_at = now - self._taken_at, now, None
        self._copier.tell(f"checkpoint of step {step} is in {self._place.name} (written in {seconds:.1f} s)")
        if self._not_removed:
            self._copier.warn(f"older checkpoints are not removed: {self._not_removed}")
            self._not_removed = ""
        path = f"{self._place.name}/{tag_of(step)}"
        known = {"last_step": step, "interval_seconds": self.interval_seconds}
        self._copier.log("saved", path=path, seconds=seconds, **known)

    def last_good(self) -> str:
        """The last complete checkpoint, in words."""
        last = max((*self.progress.kept, *self.progress.over), default=None)
        return "none" if last is None else f"that of step {last}"

    def _tell_failure(self, failure: str) -> None:
        self._copier.tell(
            f"a checkpoint could not be written: {failure}. The last complete one is {self.last_good()}; the next one "
            f"is due {self.interval_seconds / 60:g} minutes after this one (bamboo.checkpoint.interval_minutes)"
        )
        self._copier.log("failed", reason=failure)

    def _warn_if_overdue(self) -> None:
        now = self._clock()
        age = now - self._good_at
        if not is_overdue(age, interval_seconds=self.interval_seconds) or age < _LEAST_OVERDUE_SECONDS:
            return
        if self._warned_at is not None and now - self._warned_at < 2 * self.interval_seconds:
            return
        self._warned_at = now
        waits = [f"{worker} still writes that of step {step}" for worker, step in sorted(self._busy.items())]
        if self.progress.current is not None:
            waits.append(f"that of step {self.progress.current} is not complete yet")
        reason = f"no checkpoint was completed for {age / 60:.0f} minutes; the last good one is {self.last_good()}"
        self._copier.tell("; ".join([reason, *waits]))
        self._copier.log("overdue", reason="; ".join([reason, *waits]), seconds=age)
