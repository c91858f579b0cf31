"""Checkpoints that the plugin takes by itself (``bamboo.checkpoint``), for losses that redundancy can't cover.

``rounds.py`` writes them beside training. Here a job that starts finds the last whole one and continues from it, and a
job that ends keeps its last state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_bamboo.core.checkpointing import FileFact, newest
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.checking_together import choose_together, tell_choice
from deepspeed_bamboo.runtime.checkpoint.rounds import CheckpointRounds
from deepspeed_bamboo.runtime.checkpoint.safe_loading import UNREADABLE
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell, tell_once
from deepspeed_bamboo.runtime.recovery.agreed_digest import agreed_digest
from deepspeed_bamboo.storage.checking import Choice, Survey
from deepspeed_bamboo.storage.folders import Fill, open_folder
from deepspeed_bamboo.storage.place import JOB, STARTED, CheckpointPlace, step_of

STATE = "bamboo"
"""Under which name a checkpoint has the plugin's own state."""
Copy = Callable[[Coordinate, int], dict[str, Fill]]
"""The files of a coordinate that this worker owns, from a copy on the host, in the checkpoint of a step."""


class AutomaticCheckpoints:
    """One worker's part in them: :attr:`rounds` in training, the rest before and after.

    Args:
        worker: whose stages are kept.
        place: where.
        copy: copies a stage. Raises CheckpointError for lack of memory.
        interval_seconds: between two checkpoints.
        keep: how many whole ones there are at most.
    """

    def __init__(
        self, worker: Worker, *, place: CheckpointPlace, copy: Copy, interval_seconds: float, keep: int
    ) -> None:
        self._worker = worker
        self.place = place
        self._copy = copy
        self._keep = keep
        self._digest: str | None = None  # of the state that the job continues from, if known
        self.rounds = CheckpointRounds(
            _OfWorker(worker, copy), place=place, grid=worker.grid, interval_seconds=interval_seconds, keep=keep
        )

    # -- at the start ------------------------------------------------------------------------------

    def find(self) -> str | None:
        """The tag of the checkpoint to continue from, if there is one; collective. From now on the place is this job's.

        Raises CheckpointError when it can't be written, when some workers see another place than the others, and when
        there are checkpoints of which none is whole. Nothing is removed. Warnings are told.
        """
        worker, place = self._worker, self.place
        _raise_first(worker.agree_on("checkpoint place", lambda: _problem(place.take) if worker.leads else ""))
        _raise_first(
            worker.agree_on("checkpoint seen", lambda: _problem(lambda: place.check_visible(worker=worker.me)))
        )
        seen: list[Survey] = []

        def survey() -> Survey:
            seen.append(place.survey())
            return seen[-1]

        choice = choose_together(
            worker, survey=survey, look=lambda found, share: place.problems_of(found, share=share), where=place.name
        )
        tell_choice(worker, choice, where=place.name)
        if choice.error:
            raise CheckpointError(choice.error)
        grid = (worker.grid.pipelines, worker.grid.stages)
        if choice.grid not in (None, grid):
            raise CheckpointError(
                f"checkpoint {choice.tag!r} in bamboo.checkpoint.dir {place.name!r} is of a grid of "
                f"{' x '.join(map(str, choice.grid or ()))} (pipelines x stages), and this job has "
                f"{' x '.join(map(str, grid))}; give the script the same arguments, or name another directory"
            )
        self._digest = choice.digest
        self.rounds.start_from(() if choice.tag is None else self._agreed_kept(choice))
        kept, interval_seconds = self.rounds.progress.kept, self.rounds.interval_seconds
        last_step = kept[-1] if kept else step_of(choice.tag or "")
        worker.log_event("checkpoint", action="expected", interval_seconds=interval_seconds, last_step=last_step)
        return choice.tag

    def _agreed_kept(self, choice: Choice) -> tuple[int, ...]:
        """Have ``latest`` name ``choice``; returns the steps of the checkpoints that count as whole."""
        worker, place = self._worker, self.place

        def settle() -> tuple[str, list[int]]:
            if not worker.leads:
                return "", []
            kept: list[int] = []

            def look() -> None:
                place.point_to(choice)
                kept.extend(place.known_whole(choice))

            return _problem(look), kept

        settled = worker.agree_on("checkpoint chosen", settle)
        _raise_first({worker: problem for worker, (problem, _) in settled.items()})
        return newest((step for _, kept in settled.values() for step in kept), keep=self._keep)

    def check_visible(self) -> None:
        """On a worker that joins: raise CheckpointError unless it sees the place that the others write to."""
        self.place.check_visible(worker=self._worker.me)

    def restore(self, tag: str, load: Callable[..., tuple[str | None, Any]]) -> dict[str, Any]:
        """Read the checkpoint ``tag`` by ``load`` (the engine's); returns the plugin's own state in it. Collective.

        ``load`` runs no code from its files. Raises CheckpointError when it can't be read, and when what was read is
        not the state whose digest the manifest has.
        """
        try:
            with self.place.local(tag) as directory:
                _, client_state = load(directory, tag=tag)
        except UNREADABLE as error:
            raise CheckpointError(
                f"checkpoint {tag!r} in bamboo.checkpoint.dir {self.place.name!r} can't be restored "
                f"({type(error).__name__}: {error}). If it is of another training, or of another model, name another "
                "directory"
            ) from error
        found = None if self._digest is None else self._agreed_digest()
        if found != self._digest:
            raise CheckpointError(
                f"what was read from checkpoint {tag!r} in {self.place.name!r} is not the state that was saved: its "
                f"digest is {found}, and {self._digest} in the manifest, though every file is as it was written. Have "
                "the file latest name an earlier one"
            )
        return dict((client_state or {}).get(STATE, {}))

    def _agreed_digest(self) -> str:
        worker = self._worker
        return agreed_digest(host=worker.host, grid=worker.grid, agree_on=worker.agree_on)

    # -- with each iteration -----------------------------------------------------------------------

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        return self.rounds.contribution(step=self._worker.step + 1)

    def note(self) -> None:
        """After an iteration: take in what all have handed in, and do what follows from it."""
        self.rounds.note(self._worker.activity.previous[0])

    def take_if_due(self) -> None:
        """At the boundary after an iteration: copy what this worker owns, and begin to write it."""
        self.rounds.take_if_due()
        self._worker.host.activate_shown()

    def wait(self) -> None:
        """Wait until this worker has written what it began, or has failed; the next iteration tells the others."""
        self.rounds.wait()

    # -- at the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """When the script has ended: keep its last state, unless it is kept already; collective.

        A job that was stopped continues from there. A failure to write is reported, and changes nothing else.
        """
        worker, rounds, step = self._worker, self.rounds, self._worker.step
        kept = rounds.progress.kept
        if kept and kept[-1] == step:
            return
        rounds.begin_last()
        written: dict[Coordinate, dict[str, FileFact]] = {}

        def write_owned() -> None:
            if not rounds.is_quiet():
                raise CheckpointError("the checkpoint before is still being written, and takes too long")
            for coordinate in [c for c in worker.host.owned if c not in written]:
                files = self._copy(coordinate, step)
                written[coordinate] = {name: self.place.write(name, fill) for name, fill in files.items()}

        def write() -> tuple[str, dict[str, list[Any]]]:
            problem = _problem(write_owned)
            facts = {name: fact for part in written.values() for name, fact in part.items()}
            return problem, {name.rpartition("/")[2]: [fact.size, fact.sha256] for name, fact in facts.items()}

        parts = worker.agree_on("last checkpoint", write)
        worker.host.activate_shown()
        failure = _first({worker: problem for worker, (problem, _) in parts.items()})
        if not failure:
            files = {name: FileFact(*fact) for _, facts in parts.values() for name, fact in facts.items()}
            manifest = rounds.manifest(step, files, digest=self._agreed_digest())

            def name() -> str:
                if not worker.leads:
                    return ""
                over = rounds.progress.over
                return _problem(lambda: self.place.name_last(manifest, kept=kept, keep=self._keep, over=over))

            failure = _first(worker.agree_on("last checkpoint named", name))
        if failure:
            tell_once(worker, f"the state after step {step} is not kept: {failure}")
        else:
            rounds.on_named(step)


class _OfWorker:
    """What :class:`CheckpointRounds` needs of a worker; see :class:`Copier`."""

    def __init__(self, worker: Worker, copy: Copy) -> None:
        self._worker = worker
        self._copy = copy

    @property
    def worker(self) -> WorkerId:
        return self._worker.me

    @property
    def is_reporter(self) -> bool:
        return self._worker.leads

    @property
    def owned(self) -> tuple[Coordinate, ...]:
        return tuple(self._worker.host.owned)

    def copy(self, coordinate: Coordinate, *, step: int) -> dict[str, Fill]:
        return self._copy(coordinate, step)

    def tell(self, text: str) -> None:
        tell_once(self._worker, text)

    def warn(self, text: str) -> None:
        tell(self._worker, text)

    def log(self, action: str, **fields: Any) -> None:
        self._worker.log_event("checkpoint", action=action, **fields)


def automatic_checkpoints(worker: Worker, *, copy: Copy) -> AutomaticCheckpoints | None:
    """As ``bamboo.checkpoint`` says; None where it names no place. Raises CheckpointError as ``open_folder`` does."""
    session = worker.session
    settings = session.config.checkpoint
    if settings.dir is None:
        return None
    # The same for all workers of a job, another one whenever one is started.
    owner = json.dumps({JOB: session.identity.job, STARTED: session.coordinator.started_seconds()})
    place = CheckpointPlace(open_folder(settings.dir), name=settings.dir, owner=owner, watch=session.works.watch_bytes)
    interval_seconds = settings.interval_minutes * 60.0
    return AutomaticCheckpoints(worker, place=place, copy=copy, interval_seconds=interval_seconds, keep=settings.keep)


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
