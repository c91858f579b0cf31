"""Puts together what keeps states of before, on disk and in memory, and what goes back to them."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_bamboo.runtime.checkpoint.automatic import automatic_checkpoints
from deepspeed_bamboo.runtime.checkpoint.in_place import StoredStates
from deepspeed_bamboo.runtime.checkpoint.last_state import LastState
from deepspeed_bamboo.runtime.checkpoint.stage_files import StageFiles
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.owner_changes import OwnerChanges
from deepspeed_bamboo.runtime.recovery.memory_rounds import memory_rounds
from deepspeed_bamboo.runtime.redoing import Redoing
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites


class KeptStates:
    """One worker's parts; each is described where it is defined.

    ``checkpoints`` is None where the job takes none by itself, ``stored`` where it can't go back to them in place,
    ``memory`` where none are kept in memory. The arguments are those of :class:`Redoing`; ``files`` saves and loads.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        files: StageFiles,
        feed: Feed,
        batch: BatchOfJob,
        writes: ScriptWrites,
        owner_changes: OwnerChanges,
        train: Callable[[], float],
    ) -> None:
        self.checkpoints = automatic_checkpoints(worker, copy=files.copy_of)
        self.last_state = LastState(worker, self.checkpoints)
        self.stored: StoredStates | None = None
        if self.checkpoints is not None and worker.session.config.goes_back:
            self.stored = StoredStates(worker, self.checkpoints, files.load_in_place)
        self.memory = memory_rounds(worker)
        self.redoing = Redoing(
            worker,
            memory=self.memory,
            stored=self.stored,
            feed=feed,
            batch=batch,
            writes=writes,
            owner_changes=owner_changes,
            train=train,
        )
