"""DeepSpeed's checkpoints with stages that change hands: a worker saves and loads every stage that it owns.

The files are stock's, by stage and not by worker, so a whole job, and stock DeepSpeed, can read the checkpoint of a
job that has lost workers, and the other way round. A loss in between is survived: the new owner of the lost stage
saves (or loads) it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_bamboo.core.checkpointing import FileFact, facts_to_json
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.automatic import STATE
from deepspeed_bamboo.runtime.checkpoint.beginning import BEGAN, SEVERAL, Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.in_place import IN_PLACE, Ready, rest_from, rest_to_text
from deepspeed_bamboo.runtime.checkpoint.safe_loading import files_named_in_errors, no_code_from_files
from deepspeed_bamboo.runtime.checkpoint.script_files import SavedFiles, facts_of_parts, name_checkpoint, tag_to_load
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.job.past_results import PAST
from deepspeed_bamboo.runtime.recovery.stage_state import unpack_rest
from deepspeed_bamboo.runtime.stock.attributes import COUNTERS
from deepspeed_bamboo.runtime.stock.captured import CapturedFiles
from deepspeed_bamboo.runtime.stock.patches.tied_weights import tied_weights_from_files
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.storage.folders import Fill
from deepspeed_bamboo.storage.manifest import Manifest
from deepspeed_bamboo.storage.place import tag_of


class CheckpointedEngine(PipelineEngine):  # type: ignore[misc]
    """The part of the engine that saves and loads; see the module."""

    checkpoint_engine: Any  # stock's constructor sets it; it has no types
    beginning: Beginning  # the engine's
    _saved_facts: dict[str, FileFact] = {}  # noqa: RUF012 - replaced, never changed

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As stock's, and surviving losses; every worker calls it. Returns True.

        The file ``latest`` changes, at once, only when all stages are on disk, and with them a manifest that has the
        checksum of each file (none with a checkpoint engine that writes later).
        """
        started = time.perf_counter()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        decoupled = self.checkpoint_engine.is_decoupled()  # it commits later, and then writes the file itself
        super().save_checkpoint(
            os.fspath(save_dir),
            tag=tag,
            client_state={} if client_state is None else client_state,
            save_latest=save_latest and decoupled,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if not decoupled:
            self._name(Path(save_dir), tag, latest=save_latest)
        self._tell("saved", Path(save_dir) / tag, started)
        self.redundancy_repair.repair()  # if somebody was lost meanwhile
        return True

    def _name(self, folder: Path, tag: str, *, latest: bool) -> None:
        facts, self._saved_facts = self._saved_facts, {}
        grid = (self.job_grid.pipelines, self.job_grid.stages)
        manifest = Manifest(tag, self.global_steps, grid, facts, named=latest)

        def write() -> str:
            try:
                if self.is_reporter:
                    name_checkpoint(folder, manifest, tag=tag, latest=latest)
            except CheckpointError as error:
                return str(error)
            return ""

        problem = next((problem for _, problem in sorted(self.worker.agree_on("latest", write).items()) if problem), "")
        if problem:
            raise CheckpointError(f"checkpoint {tag!r} is saved, but not named: {problem}")

    def _save_checkpoint(self, save_dir: str, tag: str, **options: Any) -> None:
        """Called by stock in the middle of saving: all files of all stages, those of ZeRO included."""
        saved: set[Coordinate] = set()
        stock = self.checkpoint_engine
        files = SavedFiles(stock, Path(save_dir) / tag)

        def save_owned() -> dict[str, Any]:
            for replica in self.host.owners():
                if replica.coordinate not in saved:
                    with _said_what_failed(replica.coordinate, save_dir, tag):
                        self._save_replica(replica, save_dir, tag, **options)
                    saved.add(replica.coordinate)
            return facts_to_json(files.facts)

        if not stock.is_decoupled():
            self.checkpoint_engine = files
        try:
            self._saved_facts = facts_of_parts(self.worker.agree_on("save", save_owned))
        finally:
            self.checkpoint_engine = stock
        self.activate_first()

    def _save_replica(self, replica: StageReplica, save_dir: str, tag: str, **options: Any) -> None:
        self.worker.strike_if_scripted(replica.coordinate, "save")
        with self.host.hosting(replica):
            self._create_checkpoint_file(save_dir, tag, False)
            super()._save_checkpoint(save_dir, tag, **options)
            if self.save_zero_checkpoint:
                super()._save_zero_checkpoint(save_dir, tag)

    def capture(self, replica: StageReplica, tag: str, *, client_state: dict[str, Any]) -> dict[str, Fill]:
        """The files of ``replica`` that :meth:`save_checkpoint` would write, by path below its directory.

        Between iterations, on its owner; no other worker takes part. Raises RuntimeError for lack of memory.
        """
        captured, stock = CapturedFiles(), self.checkpoint_engine
        self.checkpoint_engine = captured
        try:
            self._save_replica(replica, "", tag, client_state=client_state)
        finally:
            self.checkpoint_engine = stock
        return captured.files

    def copy_of(self, coordinate: Coordinate, step: int) -> dict[str, Fill]:
        """The files of ``coordinate``, which this worker owns, in the plugin's own checkpoint of ``step``; a copy.

        Raises CheckpointError for lack of memory.
        """
        own = {"seed": self.forward_seed, "loss": self.mean_loss, BEGAN: self.beginning.to_json()}
        own[PAST], own[SEVERAL] = self.session.past.pieces(), self.data.several
        replica = self.host.owned[coordinate]
        self.host.save()
        try:
            own[IN_PLACE] = rest_to_text(replica, self.host.description(replica))
            return self.capture(replica, tag_of(step), client_state={STATE: own})
        except (MemoryError, RuntimeError) as error:
            problem = f"stage {coordinate} can't be copied into host memory ({error}); is there enough?"
            raise CheckpointError(problem) from error

    def _copy_recovery_script(self, save_path: str) -> None:
        """Stock's; it writes into the directory itself, which what is captured does not have."""
        if not isinstance(self.checkpoint_engine, CapturedFiles):
            super()._copy_recovery_script(save_path)

    def _save_zero_checkpoint(self, save_path: str, tag: str) -> None:
        """Called by stock after the above, which has done it."""

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, *arguments: Any, **options: Any
    ) -> tuple[str | None, Any]:
        """As stock's, and surviving losses; every worker calls it, between iterations. Shadows get what owners read.

        Where a checkpoint has a manifest its files are checked first. Without ``tag`` the newest whole one is taken if
        the one that ``latest`` names is damaged; a warning says what is wrong with it. Returns (None, None), and says
        so, only where nothing was ever saved.

        Raises CheckpointError when ``tag`` is damaged, when no checkpoint is whole, and when some workers find a
        checkpoint and others none, or another one.
        """
        before = self.worker.step
        if not self.load_universal_checkpoint():
            tag = tag_to_load(self.worker, load_dir, tag)
            if tag is None:
                self._note_load((None, None), before)
                return None, None
        with files_named_in_errors(self):
            loaded = self.load_whole(load_dir, tag, *arguments, **options)
        self._note_load(loaded, before)
        return loaded

    def _note_load(self, loaded: Loaded, before: int) -> None:
        warning = self.beginning.note(loaded, before=before, after=self.worker.step)
        if warning:
            tell_once(self.worker, warning)
        self.publish_beginning()

    def publish_beginning(self) -> None:
        """Tell workers that come later how this job's script began; collective."""
        coordinator = self.session.coordinator
        self.worker.agree_on("beginning", lambda: self.beginning.publish(coordinator) if self.worker.leads else None)

    def load_whole(self, load_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        """:meth:`load_checkpoint` of files that have been checked."""
        started = time.perf_counter()
        loaded: list[tuple[str | None, Any]] = []

        def load_owned() -> dict[str, Any] | None:
            loaded.clear()
            owned = list(self.host.owners())
            with self.session.works.watch(f"loading from {load_dir}", total=len(owned), unit="stages") as work:
                for replica in owned:
                    loaded.append(self._load_stage(replica, os.fspath(load_dir), *arguments, **options))
                    work.add(1)
            self.host.save()
            self.transfer.refresh_shadows(label=f"{self.activity.index}/load")
            return self._reading(loaded)

        readings = self.worker.agree_on("load", load_owned)
        self.activate_first()
        _check_readings(readings, load_dir)
        first = next((value for _, value in sorted(readings.items()) if value is not None), None)
        if not loaded and first is not None:
            # Nothing is owned here, but this worker counts with the others and its script sees what theirs do.
            self.__dict__.update(first["counters"])
            loaded.append((first["path"], first["client_state"]))
        path, client_state = loaded[0] if loaded else (None, None)
        if path is not None:
            self.data.resume_at(self.global_steps)
            self._tell("loaded", path, started)
            self.forget_memory()
        self.redundancy_repair.repair()
        self.owner_changes.note()
        return path, client_state

    def _load_stage(self, replica: StageReplica, load_dir: str, *arguments: Any, **options: Any) -> Loaded:
        self.worker.strike_if_scripted(replica.coordinate, "load")
        replica.finish_step()
        with self.host.hosting(replica), tied_weights_from_files(self, replica.module):
            loaded: Loaded = super().load_checkpoint(load_dir, *arguments, **options)
        return loaded

    def load_in_place(self, coordinate: Coordinate, directory: str, tag: str, ready: Ready) -> None:
        """Bring one replica, which ``ready`` returns, to its state in a checkpoint of the plugin's own; no other worker
        takes part, and no code from the files runs.

        Raises CheckpointError, or what torch raises, when they can't be read.
        """
        with no_code_from_files(self):
            path = f"{directory}/{tag}/mp_rank_{coordinate.stage:02d}_model_states.pt"
            replica = ready(coordinate, lambda: rest_from(self.checkpoint_engine.load(path, map_location="cpu"))[1])
            _, client_state = self._load_stage(replica, directory, tag=tag)
        self.host.save()
        unpack_rest(replica, rest_from(client_state)[0])
        self.transfer.completed(replica)

    def refresh_shadows(self) -> None:
        """Give shadows the state of their owners; collective, between iterations.

        Needed only where a script changes weights or optimizer state itself after ``initialize``: training and
        ``load_checkpoint`` keep shadows up to date.
        """
        self.worker.agree_on("refresh", lambda: self.transfer.refresh_shadows(label=f"{self.activity.index}/refresh"))
        self.forget_memory()
        self.owner_changes.note()

    def _tell(self, action: str, path: str | os.PathLike[str], started: float) -> None:
        seconds = time.perf_counter() - started
        self.log_event("checkpoint", action=action, path=os.fspath(path), seconds=seconds)

    def _reading(self, loaded: list[tuple[str | None, Any]]) -> dict[str, Any] | None:
        """What this worker tells the others of what it has read; nothing if it owns nothing."""
        if not loaded:
            return None
        path, client_state = loaded[0]
        wanted = not set(self.view.now.members) <= set(self.placement.workers)
        return {
            "path": None if any(path is None for path, _ in loaded) else str(path),
            "counters": {name: self.__dict__[name] for name in COUNTERS},
            "client_state": client_state if wanted else None,
        }

    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
        **options: Any,
    ) -> tuple[str | None, Any]:
        """Stock's; and for bf16 without ZeRO what stock (0.19.8) stumbles over, though it saves it: KeyError: 0.

        The bf16 optimizer is saved in files by pipeline as ZeRO is, and has to be read from them as ZeRO is.
        Raises CheckpointError where stock has an assertion without a word: no such tag, files that are missing.
        """
        _check_there(Path(load_dir), tag)
        apart = isinstance(self.optimizer, BF16_Optimizer) and not self.zero_optimization()
        try:
            path, client_state = super()._load_checkpoint(
                load_dir,
                tag,
                load_optimizer_states=load_optimizer_states and not apart,
                load_module_only=load_module_only,
                **options,
            )
        except AssertionError as error:
            where, why = Path(load_dir) / tag, f" ({error})" if str(error) else ""
            problem = wrong_stages(where, stages=self.num_stages) or (
                f"lacks files of stage {self.stage_id}{why}: it is incomplete, or of a model with other stages; pass "
                "the tag of another one"
            )
            raise CheckpointError(f"the checkpoint {str(where)!r} {problem}") from error
        if apart and path is not None and not load_module_only:
            if isinstance(client_state, dict) and load_optimizer_states:
                client_state.pop("optimizer", None)  # it was read by another way, so it is no state of the user's
            if not (load_optimizer_states and self._load_zero_checkpoint(load_dir, tag)):
                self.optimizer._restore_from_bit16_weights()
        return path, client_state


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
