"""Checkpoints that the plugin takes by itself (``bamboo.checkpoint``), for losses that redundancy can't cover.

At an iteration boundary each worker copies the stages that it owns into host memory, in DeepSpeed's own files, and a
thread writes them while training goes on. Which boundary it is, and that all parts are there, travels with the
agreement of the iterations (``core/checkpointing.py``); then the reporter changes the file ``latest``. So that file
always names a whole checkpoint, and of workers that are cut off from the others none ever changes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_bamboo.core.checkpointing import CheckpointNote, CheckpointProgress
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.background import BackgroundWriter
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.storage.folders import Fill, open_folder
from deepspeed_bamboo.storage.place import CheckpointPlace, tag_of

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine
    from deepspeed_bamboo.runtime.job.session import WorkerSession

_NOTE = "checkpoint"  # under which key a worker's note is in what it hands in
_STATE = "bamboo"  # and the plugin's own state in a checkpoint


class AutomaticCheckpoints:
    """One worker's part in it."""

    def __init__(
        self,
        engine: BambooPipelineEngine,
        *,
        place: CheckpointPlace,
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._place = place
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._writer = BackgroundWriter(place.write)
        self._progress = CheckpointProgress()
        self._taken_at = clock()
        self._given_up: set[int] = set()
        self._naming: int | None = None  # handed to the writer, and not heard of again
        self._saved_step = 0  # there is nothing to keep until more is done than this
        # Told by the writer's thread, until everybody knows.
        self._written: tuple[int, tuple[Coordinate, ...]] | None = None
        self._named: int | None = None
        self._failure = ""

    # -- at the start ------------------------------------------------------------------------------

    def find(self) -> str | None:
        """The tag of the last checkpoint, if there is one; collective. From now on the place is this job's.

        Raises CheckpointError when it can't be written, or when some workers see another place than the others.
        """
        engine, worker = self._engine, self._engine.session.worker
        _raise_first(
            engine.agree_on("checkpoint place", lambda: _problem(self._place.take) if engine.is_reporter else "")
        )

        def look() -> tuple[str | None, str]:
            try:
                return self._place.last(worker=worker), ""
            except CheckpointError as error:
                return None, str(error)

        seen = engine.agree_on("checkpoint seen", look)
        _raise_first({other: problem for other, (_, problem) in seen.items()})
        return next((tag for _, (tag, _) in sorted(seen.items())), None)

    def check_visible(self) -> None:
        """On a worker that joins: raise CheckpointError unless it sees the place that the others write to."""
        self._place.last(worker=self._engine.session.worker)

    def restore(self, tag: str, load: Callable[..., tuple[str | None, Any]]) -> dict[str, Any]:
        """Read the checkpoint ``tag`` by ``load`` (the engine's); returns the plugin's own state in it. Collective."""
        try:
            with self._place.local(tag) as directory:
                _, client_state = load(directory, tag=tag)
        except (CheckpointError, RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {tag!r} in bamboo.checkpoint.dir {self._place.name!r} can't be restored ({error}). If it "
                "is of another training, or of another model, name another directory"
            ) from error
        self._saved_step = self._engine.global_steps
        return dict((client_state or {}).get(_STATE, {}))

    # -- with each iteration -----------------------------------------------------------------------

    def contribution(self) -> dict[str, CheckpointNote]:
        """What this worker hands in with the agreement of an iteration."""
        late = self._clock() - self._taken_at >= self._interval_seconds
        note = CheckpointNote(
            take=self._engine.is_reporter and self._progress.idle and (late or self._progress.due),
            written=self._written,
            named=self._named,
            failure=self._failure,
        )
        return {_NOTE: note} if note != CheckpointNote() else {}

    def note(self) -> None:
        """After an iteration: take in what all have handed in, and do what follows from it."""
        engine, before = self._engine, self._progress
        notes = {worker: value.get(_NOTE, CheckpointNote()) for worker, value in engine.activity.previous[0].items()}
        self._forget_told(notes.get(engine.session.worker, CheckpointNote()))
        now = before.after(notes, step=engine.global_steps, owners=dict(engine.placement.owners))
        self._progress = now
        if before.step is not None and before.step not in (now.step, now.complete):
            self._given_up.add(before.step)
            self._discard()
        if now.failure:
            self._naming = None
            self._tell_failure(now.failure)
        elif before.complete is not None and now.complete is None:
            self._on_named(before.complete)
        if now.complete is not None and engine.is_reporter and self._naming != now.complete:
            self._naming = now.complete
            self._begin_to_name(now.complete)

    def take_if_due(self) -> None:
        """At the boundary after an iteration: copy what this worker owns, and begin to write it."""
        engine, step = self._engine, self._engine.global_steps
        if self._progress.step != step:
            return
        self._taken_at, started = self._clock(), time.perf_counter()
        self._discard()  # others may have gone on writing what was given up
        self._given_up.clear()
        owned = tuple(engine.host.owned)
        try:
            files = {name: fill for c in owned for name, fill in self._captured(c, step=step).items()}
        except CheckpointError as error:
            self._failure = str(error)
            return
        finally:
            engine.activate_first()
        engine.log_event("checkpoint", action="taken", seconds=time.perf_counter() - started)

        def done(failure: str) -> None:
            if failure:
                self._failure = failure
            else:
                self._written = (step, owned)

        self._writer.write(files, done=done)

    def wait(self) -> None:
        """Until what this worker has begun to write is there, or can't be; others hear of it in the next iteration."""
        self._writer.wait()

    def _captured(self, coordinate: Coordinate, *, step: int) -> dict[str, Fill]:
        engine = self._engine
        own = {"seed": engine.forward_seed, "loss": engine.mean_loss}
        try:
            return engine.capture(engine.host.owned[coordinate], tag_of(step), client_state={_STATE: own})
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"stage {coordinate} can't be copied into host memory ({error}); is there enough?"
            ) from error

    def _begin_to_name(self, step: int) -> None:
        def done(failure: str) -> None:
            if failure:
                self._failure = failure
            else:
                self._named = step

        self._writer.call(lambda: self._place.name_last(step), done=done)

    def _discard(self) -> None:
        """As the reporter: remove what there is of checkpoints that were given up. What can't be removed stays."""
        steps = frozenset(self._given_up)
        if steps and self._engine.is_reporter:
            self._writer.call(lambda: self._place.discard(steps), done=lambda failure: None)

    def _forget_told(self, own: CheckpointNote) -> None:
        """What everybody has heard of need not be said again."""
        if own.written is not None:
            self._written = None
        if own.named is not None:
            self._named = None
        if own.failure:
            self._failure = ""

    def _on_named(self, step: int) -> None:
        engine, self._saved_step, self._naming = self._engine, step, None
        seconds = self._clock() - self._taken_at
        tell_once(engine, f"checkpoint of step {step} is in {self._place.name} (written in {seconds:.1f} s)")
        path = f"{self._place.name}/{tag_of(step)}"
        engine.log_event("checkpoint", action="saved", path=path, seconds=seconds)

    def _tell_failure(self, failure: str) -> None:
        last = f"that of step {self._saved_step}" if self._saved_step else "none"
        tell_once(
            self._engine,
            f"a checkpoint could not be written: {failure}. The last complete one is {last}; the next one is due "
            f"{self._interval_seconds / 60:g} minutes after this one (bamboo.checkpoint.interval_minutes)",
        )
        self._engine.log_event("checkpoint", action="failed", reason=failure)

    # -- at the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """When the script has ended: keep its last state, unless it is kept already; collective.

        A job that was told to stop goes on from there. What can't be written is told, and changes nothing else.
        """
        engine, step = self._engine, self._engine.global_steps
        # Who joined late may not know what is kept.
        if step == max(engine.agree_on("kept", lambda: self._saved_step).values()):
            return
        self._taken_at = self._clock()
        self.wait()
        written: set[Coordinate] = set()

        def write_owned() -> None:
            for coordinate in [c for c in engine.host.owned if c not in written]:
                for name, fill in self._captured(coordinate, step=step).items():
                    self._place.write(name, fill)
                written.add(coordinate)

        failure = _first(engine.agree_on("last checkpoint", lambda: _problem(write_owned)))
        if not failure:

            def name() -> str:
                return _problem(lambda: self._place.name_last(step)) if engine.is_reporter else ""

            failure = _first(engine.agree_on("last checkpoint named", name))
        engine.activate_first()
        if failure:
            tell_once(engine, f"the state after step {step} is not kept: {failure}")
        else:
            self._on_named(step)


def automatic_checkpoints(engine: BambooPipelineEngine, session: WorkerSession) -> AutomaticCheckpoints | None:
    """As ``bamboo.checkpoint`` says; None where it names no place. Raises CheckpointError as ``open_folder`` does."""
    settings = session.config.checkpoint
    if settings.dir is None:
        return None
    # The same for all workers of a job, another one whenever one is started.
    owner = json.dumps({"job": session.identity.job, "started_seconds": session.coordinator.started_seconds()})
    place = CheckpointPlace(open_folder(settings.dir), name=settings.dir, owner=owner)
    return AutomaticCheckpoints(engine, place=place, interval_seconds=settings.interval_minutes * 60.0)


def _problem(call: Callable[[], Any]) -> str:
    """What is wrong, if ``call`` finds that something is."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def _first(problems: Mapping[WorkerId, str]) -> str:
    """The problem of the first worker that has one."""
    return next((problem for _, problem in sorted(problems.items()) if problem), "")


def _raise_first(problems: Mapping[WorkerId, str]) -> None:
    if problem := _first(problems):
        raise CheckpointError(problem)
