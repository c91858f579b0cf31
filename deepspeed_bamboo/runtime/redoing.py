"""Keeps memory checkpoints, and does steps again after an earlier state was restored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepspeed_bamboo.core.memory_rounds import MemoryProgress
from deepspeed_bamboo.runtime.checkpoint.in_place import StoredStates
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.owner_changes import OwnerChanges
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds, limit_bytes
from deepspeed_bamboo.runtime.recovery.restore import WayBack
from deepspeed_bamboo.runtime.stock.noted_values import NotedValues
from deepspeed_bamboo.runtime.stock.script_globals import GlobalValues, globals_again, globals_now
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites
from deepspeed_bamboo.runtime.stock.torch_modes import TorchModes, training_modes


class Redoing:
    """One worker's past steps, as far as they may have to be done again; see the module.

    Args:
        worker: who does them.
        memory: its memory checkpoints, None where none are kept.
        stored: the states in ``checkpoint.dir`` that the job may go back to, None where there are none.
        feed: where micro-batches come from.
        batch: the size of the job's batch.
        writes: carries what the script writes into its optimizers.
        owner_changes: knows whether the script changes weights itself.
        train: does the next iteration, of which the script does not hear, and returns its loss.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        memory: MemoryRounds | None,
        stored: StoredStates | None,
        feed: Feed,
        batch: BatchOfJob,
        writes: ScriptWrites,
        owner_changes: OwnerChanges,
        train: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._stored = stored
        self._feed = feed
        self._batch = batch
        self._writes = writes
        self._owner_changes = owner_changes
        self._train = train
        self.history = StepHistory()

    def way_back(self, *, count_to: Callable[[int], None]) -> WayBack:
        """What it takes to do steps again; ``count_to`` has a worker that stands by be at a step."""
        return WayBack(
            history=self.history,
            data=lambda: self._feed.data,
            writes=self._writes,
            redo=self._redo_step,
            count_to=count_to,
            look_alike=self._owner_changes.note,
            changed_by_hand=self._owner_changes.redoes_from,
            store=lambda: self._stored,
        )

    # -- with each iteration -----------------------------------------------------------------------

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        if self._memory is None:
            return {}
        wanted = not self._owner_changes.by_hand and not self._worker.confined
        return self._memory.contribution(step=self._worker.step + 1, wanted=wanted)

    def note(self) -> None:
        """At the end of an iteration that the script sees: take in what was agreed of memory checkpoints with it."""
        # What was noted with an iteration that was done again belongs to checkpoints of before.
        if self._memory is not None and not self._worker.activity.was_redone:
            self._memory.note(self._worker.activity.previous[0])

    def keep(self, *, loss: float) -> None:
        """At the boundary after an iteration: note what it takes to do it again, and take a checkpoint if it is due."""
        memory, step = self._memory, self._worker.step
        self._owner_changes.rest()
        written = self._writes.take_written()
        if memory is None and self._stored is None:
            return
        self.history.note(written=written)
        modes = TorchModes.now(self._worker.device)
        self.history.done(step - 1, loss=loss, size=self._batch.size(), modes=modes, named=self._globals_now())
        if memory is not None:
            memory.take_if_due()
            self._worker.host.activate_shown()
        first = self._first_to_keep()
        self.history.begin_at(first)
        self._feed.data.keep_from(first)

    def _globals_now(self) -> GlobalValues:
        return globals_now(replica.module for replica in self._worker.host.replicas())

    def _first_to_keep(self) -> int:
        """The first step that may have to be done again."""
        if self._owner_changes.by_hand or self._worker.confined:
            return self._worker.step
        in_memory = None if self._memory is None else self._memory.first_wanted
        wanted = sorted({*(() if in_memory is None else (in_memory,)), *(self._stored.wanted if self._stored else ())})
        if wanted and self._feed.data.kept_bytes + self.history.kept_bytes > self._data_limit_bytes:
            wanted = [step for step in wanted if step > self.history.first]
        return wanted[0] if wanted else self._worker.step

    @functools.cached_property
    def _data_limit_bytes(self) -> float:
        """What the micro-batches may take that are kept."""
        if self._memory is not None:
            return self._memory.limit_bytes
        return limit_bytes(self._worker.session.config.checkpoint.memory_limit_gigabytes)

    def note_values(self, values: Iterable[NotedValues]) -> None:
        """The script has set these in layers and hooks before the next step."""
        if self._memory is not None or self._stored is not None:
            self.history.note(values=values)

    def forget(self) -> None:
        """The state has become another one otherwise than by training; on all workers, between iterations."""
        self.history.begin_anew(self._worker.step)
        self._writes.take_written()
        if self._memory is not None:
            self._memory.forget()
        if self._stored is not None:
            self._stored.forget()
        if self._memory is not None or self._stored is not None:
            self._feed.data.keep()

    # -- doing a step again ------------------------------------------------------------------------

    def _redo_step(self) -> None:
        """Do the next iteration as it was done before. The script does not see it."""
        worker = self._worker
        step, size, past = worker.step, self._batch.size(), self.history.of(worker.step)
        modes = past.modes or self.history.newest_modes or TorchModes.now(worker.device)
        named = self._globals_now() if past.named is None else past.named
        with training_modes(), modes.again(), globals_again(named), self._feed.reading(None):
            self._batch.use(past.size)
            worker.links.forget_forms()  # the last step that was done may have had other shapes
            self._feed.agree()
            for replica in worker.host.replicas():
                worker.host.restart(replica, micro_batches=worker.micro_batches)
            worker.host.activate_shown()
            loss = self._train()
            self.history.note(written=self._writes.take_written())
            before = self.history.done(step, loss=loss, size=self._batch.size(), modes=modes, named=named)
            self._batch.use(size)
            worker.links.forget_forms()
        worker.session.log("redone", step=step, loss=loss)
        if before is not None and before != loss and not (math.isnan(before) and math.isnan(loss)):
            tell_once(
                worker,
                f"step {step} was done again with the loss {loss!r}, and had {before!r}: the same work does not give "
                "the same bits here",
            )

    # -- what a worker that joins has to know ------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know of the states that the job may go back to."""
        progress = MemoryProgress() if self._memory is None else self._memory.progress
        return {
            "progress": progress.to_json(),
            "plain_from": self.history.plain_from,
            "unseen": self._worker.activity.unseen,
            "others": [] if self._stored is None else self._stored.to_json(),
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`, where the job's step is known.

        What others have done before this worker came it could do again only with data that can be had from any step on.
        """
        self.forget()
        self._worker.activity.unseen = int(value["unseen"])
        if self._memory is not None:
            self._memory.progress = MemoryProgress.from_json(value["progress"])
        if self._stored is not None:
            self._stored.take(value["others"])
        if self._feed.data.covers_every_pipeline:
            self.history.first = min(self.history.first, int(value["plain_from"]))
