"""DeepSpeed's checkpoints with stages that change hands: a worker saves and loads every stage that it owns.

The files are stock's, by stage and not by worker, so a whole job, and stock DeepSpeed, can read the checkpoint of a
job that has lost workers, and the other way round. A loss in between is survived: the new owner of the lost stage
saves (or loads) it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.checkpointing import FileFact, facts_to_json
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.automatic import STATE
from deepspeed_bamboo.runtime.checkpoint.beginning import BEGAN, SAVED_CALL, SEVERAL, Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.in_place import IN_PLACE, Ready, rest_from, rest_to_text
from deepspeed_bamboo.runtime.checkpoint.safe_loading import files_named_in_errors, no_code_from_files
from deepspeed_bamboo.runtime.checkpoint.script_files import SavedFiles, facts_of_parts, name_checkpoint, tag_to_load
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked, Resume, latest_in, resume_of
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.job.past_results import PAST
from deepspeed_bamboo.runtime.recovery.stage_state import unpack_rest
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.stock.captured import CapturedFiles
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.scheduler_state import NumbersBefore
from deepspeed_bamboo.runtime.stock.stock_files import StockFiles
from deepspeed_bamboo.storage.folders import Fill
from deepspeed_bamboo.storage.manifest import Manifest
from deepspeed_bamboo.storage.place import tag_of


@dataclass(frozen=True)
class Around:
    """What else a checkpoint concerns.

    ``data`` returns the script's, whose position moves. ``numbers`` returns the plugin's own: the seed, and the loss of
    the last iteration. ``repair`` makes shadows anew after a loss meanwhile; ``make_alike`` is called, by all workers,
    before shadows get their owners' state; ``loaded`` when owners and shadows have another state than training has
    brought, ``alike`` when they are alike again.
    """

    data: Callable[[], PipelineData]
    numbers: Callable[[], dict[str, Any]]
    repair: Callable[[], object]
    make_alike: Callable[[], None]
    loaded: Callable[[], None]
    alike: Callable[[], None]


class StageFiles:
    """One worker's part in checkpoints; see the module.

    Args:
        worker: whose stages are saved and loaded.
        stock: saves and loads one stage.
        transfer: brings what owners have loaded to their shadows.
        beginning: what the script loaded when the job began.
        around: what else changes.
    """

    def __init__(
        self, worker: Worker, *, stock: StockFiles, transfer: StateTransfer, beginning: Beginning, around: Around
    ) -> None:
        self._worker = worker
        self._stock = stock
        self._transfer = transfer
        self._beginning = beginning
        self._loads_own = False
        self._around = around
        self._facts: dict[str, FileFact] = {}  # of the files that have just been saved

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None,
        *,
        client_state: dict[str, Any],
        latest: bool,
        options: dict[str, Any],
    ) -> None:
        """Save all stages as checkpoint ``tag`` in ``directory``, and have the file ``latest`` name it; collective.

        ``options`` are stock's. Raises CheckpointError when a file can't be written.
        """
        started = time.perf_counter()
        tag = f"global_step{self._worker.step}" if tag is None else str(tag)
        decoupled = self._stock.checkpoint_engine.is_decoupled()  # it commits later, and then writes the file itself
        state = {**client_state, SAVED_CALL: self._beginning.call_of(self._worker.step)}
        self._stock.save(os.fspath(directory), tag=tag, client_state=state, save_latest=latest and decoupled, **options)
        folder = Path(directory)
        if not decoupled:
            self._name(folder, tag, latest=latest)
        self._tell("saved", folder / tag, started)
        self._around.repair()  # if somebody was lost meanwhile

    def _name(self, folder: Path, tag: str, *, latest: bool) -> None:
        worker = self._worker
        facts, self._facts = self._facts, {}
        manifest = Manifest(tag, worker.step, (worker.grid.pipelines, worker.grid.stages), facts, named=latest)

        def write() -> str:
            try:
                if worker.is_reporter:
                    name_checkpoint(folder, manifest, tag=tag, latest=latest)
            except CheckpointError as error:
                return str(error)
            return ""

        problem = next((problem for _, problem in sorted(worker.agree_on("latest", write).items()) if problem), "")
        if problem:
            raise CheckpointError(f"checkpoint {tag!r} is saved, but not named: {problem}")

    def save_all(self, folder: str, tag: str, **options: Any) -> None:
        """In the middle of stock's saving: all files of all stages, those of ZeRO included; collective."""
        saved: set[Coordinate] = set()
        stock = self._stock.checkpoint_engine
        files = SavedFiles(stock, Path(folder) / tag)

        def save_owned() -> dict[str, Any]:
            for replica in self._worker.host.owners():
                if replica.coordinate not in saved:
                    with _said_what_failed(replica.coordinate, folder, tag):
                        self._save_replica(replica, folder, tag, **options)
                    saved.add(replica.coordinate)
            return facts_to_json(files.facts)

        with nullcontext() if stock.is_decoupled() else self._stock.through(files):
            self._facts = facts_of_parts(self._worker.agree_on("save", save_owned))
        self._worker.host.activate_shown()

    def _save_replica(self, replica: StageReplica, folder: str, tag: str, **options: Any) -> None:
        self._worker.strike_if_scripted(replica.coordinate, "save")
        # The script's own scheduler is with one stage of its worker; a checkpoint has its state in each stage's file.
        with self._worker.host.hosting(replica), self._stock.scheduler_or(replica.script_scheduler):
            self._stock.save_stage(folder, tag, **options)

    def capture(self, replica: StageReplica, tag: str, *, client_state: dict[str, Any]) -> dict[str, Fill]:
        """The files of ``replica`` that :meth:`save` would write, by path below its directory.

        Between iterations, on its owner; no other worker takes part. Raises RuntimeError for lack of memory.
        """
        captured = CapturedFiles()
        with self._stock.through(captured):
            self._save_replica(replica, "", tag, client_state=client_state)
        return captured.files

    @property
    def captures(self) -> bool:
        """True inside :meth:`capture`: there is no directory to write into."""
        return isinstance(self._stock.checkpoint_engine, CapturedFiles)

    def copy_of(self, coordinate: Coordinate, step: int) -> dict[str, Fill]:
        """The files of ``coordinate``, which this worker owns, in the plugin's own checkpoint of ``step``; a copy.

        Raises CheckpointError for lack of memory.
        """
        worker = self._worker
        own = {**self._around.numbers(), BEGAN: self._beginning.to_json()}
        own[PAST], own[SEVERAL] = worker.session.past.pieces(), self._around.data().several
        replica = worker.host.owned[coordinate]
        worker.host.save()
        try:
            own[IN_PLACE] = rest_to_text(replica, worker.host.description(replica))
            return self.capture(replica, tag_of(step), client_state={STATE: own})
        except (MemoryError, RuntimeError) as error:
            problem = f"stage {coordinate} can't be copied into host memory ({error}); is there enough?"
            raise CheckpointError(problem) from error

    # -- loading -----------------------------------------------------------------------------------

    def load(
        self, folder: str | os.PathLike[str], tag: str | None, *, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Loaded:
        """Check checkpoint ``tag``, or the newest whole one, and load it on owners and shadows; collective.

        ``arguments`` and ``options`` are stock's. Raises CheckpointError when what is there can't be loaded.
        """
        before = self._worker.step
        wanted = Asked.of(folder, tag, arguments, options, lambda: (None, None)).wanted
        if not self._stock.reads_universal:
            tag = tag_to_load(self._worker, folder, tag)
            if tag is None:
                self._note_load((None, None), before, wanted)
                return None, None
        with files_named_in_errors(self._stock):
            loaded = self._load_whole(folder, tag, *arguments, **options)
        self._note_load(loaded, before, wanted)
        return loaded

    def _note_load(self, loaded: Loaded, before: int, wanted: str) -> None:
        warning = self._beginning.note(loaded, before=before, after=self._worker.step, wanted=wanted)
        if warning:
            tell_once(self._worker, warning)
        self.publish_beginning()

    def resume(self, folder: str, tag: str | None, *, together: bool) -> Resume | None:
        """What loading the script's own checkpoint ``tag``, or its newest one, would return; None where there is none.

        Nothing is loaded. ``together``: on all workers, which check its files and agree on it; collective then. Raises
        CheckpointError when it can't be read.
        """
        tag = tag_to_load(self._worker, folder, tag) if together else tag or latest_in(folder)
        if tag is None:
            return None
        with files_named_in_errors(self._stock):
            return resume_of(folder, tag, read=self._stock.checkpoint_engine.load)

    def publish_beginning(self) -> None:
        """Tell workers that come later how this job's script began; collective."""
        worker, coordinator = self._worker, self._worker.session.coordinator
        worker.agree_on("beginning", lambda: self._beginning.publish(coordinator) if worker.leads else None)

    def load_without_code(self, folder: str, *, tag: str) -> Loaded:
        """Load a checkpoint of the plugin's own that has been checked, and run no code from its files; collective."""
        with self._own_files():
            return self._load_whole(folder, tag=tag)

    @contextmanager
    def _own_files(self) -> Iterator[None]:
        """Inside, files of the plugin's own are loaded: no code from them runs. Schedulers are set to what they say,
        for this may be the second time.
        """
        self._loads_own = True
        try:
            with no_code_from_files(self._stock):
                yield
        finally:
            self._loads_own = False

    def _load_whole(self, folder: str | os.PathLike[str], *arguments: Any, **options: Any) -> Loaded:
        """Load files that have been checked."""
        worker, started = self._worker, time.perf_counter()
        loaded: list[Loaded] = []
        options["numbers"] = NumbersBefore()  # after a loss all is loaded again

        def load_owned() -> dict[str, Any] | None:
            loaded.clear()
            owned = list(worker.host.owners())
            with worker.session.works.watch(f"loading from {folder}", total=len(owned), unit="stages") as work:
                for replica in owned:
                    loaded.append(self._load_stage(replica, os.fspath(folder), *arguments, **options))
                    work.add(1)
            worker.host.save()
            self._transfer.refresh_shadows(label=f"{worker.activity.index}/load")
            return self._reading(loaded)

        self._around.make_alike()
        readings = worker.agree_on("load", load_owned)
        worker.host.activate_shown()
        _check_readings(readings, folder)
        first = next((value for _, value in sorted(readings.items()) if value is not None), None)
        if not loaded and first is not None:
            # Nothing is owned here, but this worker counts with the others and its script sees what theirs do.
            self._stock.count(first["counters"])
            loaded.append((first["path"], first["client_state"]))
        path, client_state = loaded[0] if loaded else (None, None)
        if path is not None:
            self._around.data().resume_at(worker.step)
            self._tell("loaded", path, started)
            self._around.loaded()
        self._around.repair()
        self._around.alike()
        return path, client_state

    def _load_stage(self, replica: StageReplica, folder: str, *arguments: Any, **options: Any) -> Loaded:
        self._worker.strike_if_scripted(replica.coordinate, "load")
        replica.finish_step()
        with self._worker.host.hosting(replica):
            return self._stock.load_stage(replica.module, folder, *arguments, **options)

    def load_files(
        self,
        folder: str,
        tag: str,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
        **options: Any,
    ) -> Loaded:
        """In the middle of stock's loading: read the files of the active stage.

        Raises CheckpointError where stock has an assertion without a word: no such tag, files that are missing.
        """
        _check_there(Path(folder), tag)
        wanted = {"load_optimizer_states": load_optimizer_states}
        try:
            with self._stock.setting_schedulers() if self._loads_own else nullcontext():
                path, client_state = self._stock.load_files(
                    folder, tag, load_module_only=load_module_only, **wanted, **options
                )
        except AssertionError as error:
            where, why = Path(folder) / tag, f" ({error})" if str(error) else ""
            stage, stages = self._stock.stages
            problem = wrong_stages(where, stages=stages) or (
                f"lacks files of stage {stage}{why}: it is incomplete, or of a model with other stages; pass "
                "the tag of another one"
            )
            raise CheckpointError(f"the checkpoint {str(where)!r} {problem}") from error
        if isinstance(client_state, dict):
            client_state.pop(SAVED_CALL, None)  # it is no state of the user's
        if path is not None and not load_module_only:
            self._stock.load_optimizer_apart(folder, tag, client_state, **wanted)
        return path, client_state

    def load_in_place(self, coordinate: Coordinate, directory: str, tag: str, ready: Ready) -> None:
        """Bring one replica, which ``ready`` returns, to its state in a checkpoint of the plugin's own; no other worker
        takes part, and no code from the files runs.

        Raises CheckpointError, or what torch raises, when they can't be read.
        """
        with self._own_files():
            path = f"{directory}/{tag}/mp_rank_{coordinate.stage:02d}_model_states.pt"
            read = self._stock.checkpoint_engine.load
            replica = ready(coordinate, lambda: rest_from(read(path, map_location="cpu"))[1])
            _, client_state = self._load_stage(replica, directory, tag=tag)
        self._worker.host.save()
        unpack_rest(replica, rest_from(client_state)[0])
        self._transfer.completed(replica)

    def refresh_shadows(self) -> None:
        """Give shadows the state of their owners; collective, between iterations."""
        activity = self._worker.activity  # its index may be another one after a recovery
        self._around.make_alike()
        self._worker.agree_on("refresh", lambda: self._transfer.refresh_shadows(label=f"{activity.index}/refresh"))
        self._around.loaded()
        self._around.alike()

    def _tell(self, action: str, path: str | os.PathLike[str], started: float) -> None:
        seconds = time.perf_counter() - started
        self._worker.log_event("checkpoint", action=action, path=os.fspath(path), seconds=seconds)

    def _reading(self, loaded: list[Loaded]) -> dict[str, Any] | None:
        """What this worker tells the others of what it has read; nothing if it owns nothing."""
        if not loaded:
            return None
        path, client_state = loaded[0]
        wanted = not set(self._worker.view.now.members) <= set(self._worker.placement.workers)
        return {
            "path": None if any(path is None for path, _ in loaded) else str(path),
            "counters": self._stock.counters(),
            "client_state": client_state if wanted else None,
        }


@contextmanager
def _said_what_failed(coordinate: Coordinate, folder: str, tag: str) -> Iterator[None]:
    """Inside, a file that can't be written raises CheckpointError; torch has odd words for a full disk."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"stage {coordinate} can't be saved as {tag!r} in {folder!r}: {error}. Is there room, may it be written? "
            "The file latest still names the checkpoint before"
        ) from error


def wrong_stages(folder: Path, *, stages: int) -> str | None:
    """What is wrong with the files of stages in a checkpoint for a job of so many; None where they are all there."""
    names = (path.name for path in folder.glob("mp_rank_*_model_states.pt"))
    found = {int(number) for name in names if (number := name.split("_")[2]).isdigit()}
    missing = sorted(set(range(stages)) - found)
    if found and found == set(range(len(found))) and len(found) != stages and len(found) > 1:
        return (
            f"was saved by a job of {len(found)} stages, and this one has {stages}; start this job with as many, or "
            "pass the tag of another checkpoint"
        )
    if not missing:
        return None
    named = f"stage {missing[0]}" if len(missing) == 1 else f"stages {', '.join(map(str, missing))}"
    return f"lacks files of {named} of {stages}: it is incomplete; pass the tag of another one"


def _check_there(folder: Path, tag: str) -> None:
    """Raise CheckpointError unless there is a checkpoint called ``tag``."""
    if tag and (folder / tag).is_dir():
        return
    found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    what = (
        f"there is no checkpoint {tag!r} in {str(folder)!r}" if tag else f"the file latest in {str(folder)!r} is empty"
    )
    raise CheckpointError(f"{what}; pass the tag of one that there is: {', '.join(found) or 'none is'}")


def _check_readings(readings: Any, folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless all who own something have read the same, or all nothing."""
    found = {worker: value for worker, value in sorted(readings.items()) if value is not None}
    steps = {value["counters"]["global_steps"] for value in found.values()}
    missing = [worker for worker, value in found.items() if value["path"] is None]
    if missing and len(missing) < len(found):
        raise CheckpointError(
            f"workers {', '.join(missing)} found no checkpoint in {os.fspath(folder)!r}, others did; every worker may "
            "come to own any stage, so the folder must be one that all machines see"
        )
    if len(steps) > 1:
        raise CheckpointError(
            f"the workers read different checkpoints from {os.fspath(folder)!r}: of steps {sorted(steps)}; the folder "
            "must be one that all machines see, or pass the same tag everywhere"
        )
