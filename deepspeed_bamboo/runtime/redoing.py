"""The part of the engine that keeps memory checkpoints, and does steps again after one was restored."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.core.contributions import merged
from deepspeed_bamboo.core.memory_rounds import MemoryProgress
from deepspeed_bamboo.runtime.checkpoint.automatic import AutomaticCheckpoints
from deepspeed_bamboo.runtime.checkpoint.in_place import StoredStates
from deepspeed_bamboo.runtime.for_scripts import ScriptEngine
from deepspeed_bamboo.runtime.iteration.activity import ActivityState
from deepspeed_bamboo.runtime.iteration.losses import aggregate_losses, stage_losses
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration
from deepspeed_bamboo.runtime.owner_changes import OwnerChanges
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds, limit_bytes
from deepspeed_bamboo.runtime.recovery.restore import WayBack
from deepspeed_bamboo.runtime.recovery.take_over import Failover
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites


class RedoingEngine(ScriptEngine):
    """See the module. ``memory`` is None where no memory checkpoints are kept, ``stored`` where there is no store."""

    # The engine's; whose they are is said there.
    script_writes: ScriptWrites
    owner_changes: OwnerChanges
    failover: Failover
    modes: ModeChoice
    reconfiguration: Reconfiguration
    checkpoints: AutomaticCheckpoints | None
    activity: ActivityState
    mean_loss: float
    _compute_loss: bool
    eval_return_logits: bool
    memory: MemoryRounds | None = None
    stored: StoredStates | None = None
    history: StepHistory

    def _way_back(self) -> WayBack:
        """What it takes to do steps again."""
        return WayBack(
            history=lambda: self.history,
            data=lambda: self.data,
            writes=self.script_writes,
            redo=self._redo_step,
            count_to=self.count_to,
            look_alike=self.owner_changes.note,
            store=lambda: self.stored,
        )

    def _first_contribution(self) -> dict[str, Any]:
        losses: dict[str, Any] = {"losses": stage_losses(self)}  # type: ignore[arg-type]
        if self.failover.redoing:
            return losses
        return merged(
            losses,
            self._memory_contribution(),
            self.modes.contribution(),
            self.owner_changes.contribution(),
            self.checkpoints.contribution() if self.checkpoints is not None else {},
            self.reconfiguration.contribution(),
        )

    def _take_in_what_was_agreed(self) -> None:
        """What all have handed in with the iteration that has just ended; an iteration done again brings no news."""
        self.reconfiguration.note()
        self.owner_changes.learn(self.activity.previous[0])
        self._note_memory()
        if self.checkpoints is not None:
            self.checkpoints.note()

    def _note_memory(self) -> None:
        """At the end of an iteration that the script sees: take in what was agreed of memory checkpoints with it."""
        # What was noted with an iteration that was done again belongs to checkpoints of before.
        if self.memory is not None and not self.activity.was_redone:
            self.memory.note(self.activity.previous[0])

    def _memory_contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        if self.memory is None:
            return {}
        wanted = not self.owner_changes.by_hand and not self.worker.confined
        return self.memory.contribution(step=self.worker.step + 1, wanted=wanted)

    def _keep_in_memory(self) -> None:
        """At the boundary after an iteration: note what it takes to do it again, and take a checkpoint if it is due."""
        memory, step = self.memory, self.worker.step
        written = self.script_writes.take_written()
        if memory is None and self.stored is None:
            return
        self.history.note(written=written)
        self.history.done(step - 1, loss=self.mean_loss, samples=self.train_batch_size())
        if memory is not None:
            memory.take_if_due()
            self.host.activate_shown()
        first = self._first_to_keep()
        self.history.begin_at(first)
        self.data.keep_from(first)

    def _first_to_keep(self) -> int:
        """The first step that may have to be done again."""
        if self.owner_changes.by_hand or self.worker.confined:
            return self.worker.step
        in_memory = None if self.memory is None else self.memory.first_wanted
        wanted = sorted({*(() if in_memory is None else (in_memory,)), *(self.stored.wanted if self.stored else ())})
        if wanted and self.data.kept_bytes > self._data_limit_bytes:
            wanted = [step for step in wanted if step > self.history.first]
        return wanted[0] if wanted else self.worker.step

    @functools.cached_property
    def _data_limit_bytes(self) -> float:
        """What the micro-batches may take that are kept."""
        if self.memory is not None:
            return self.memory.limit_bytes
        return limit_bytes(self.worker.session.config.checkpoint.memory_limit_gigabytes)

    def forget_memory(self) -> None:
        """The state has become another one otherwise than by training; on all workers, between iterations."""
        self.history = StepHistory.beginning_at(self.worker.step)
        self.script_writes.take_written()
        if self.memory is not None:
            self.memory.forget()
        if self.stored is not None:
            self.stored.forget()
        if self.memory is not None or self.stored is not None:
            self.data.keep()

    def leave(self) -> None:
        """As without memory checkpoints; nobody sends or gets any more of them."""
        if self.memory is not None:
            self.memory.close()
        super().leave()

    def count_to(self, step: int) -> None:
        """Be at ``step``, on a worker that stands by: what stock counts in its optimizer steps."""
        more = step - self.worker.step
        self.__dict__["global_steps"] = step
        self.__dict__["global_samples"] += more * self.train_batch_size()
        self.__dict__["micro_steps"] += more * self.micro_batches

    def _redo_step(self) -> None:
        """Do the next iteration as it was done before. The script does not see it."""
        aside = self._compute_loss, self.eval_return_logits
        self._compute_loss, self.eval_return_logits = True, False
        step, samples = self.worker.step, self.train_batch_size()
        with self.feed.reading(None):
            self._take_batch_size(self.history.of(step).samples)
            self.feed.supply.agree()
            for replica in self.host.replicas():
                self.host.restart(replica, micro_batches=self.micro_batches)
            self.host.activate_shown()
            self._train_iteration()
            aggregate_losses(self)  # type: ignore[arg-type]
            self.history.note(written=self.script_writes.take_written())
        loss = self.mean_loss
        before = self.history.done(step, loss=loss, samples=self.train_batch_size())
        self._take_batch_size(samples)
        self.session.log("redone", step=step, loss=loss)
        if before is not None and before != loss and not (math.isnan(before) and math.isnan(loss)):
            tell_once(
                self.worker,
                f"step {step} was done again with the loss {loss!r}, and had {before!r}: the same work does not give "
                "the same bits here",
            )
        self._compute_loss, self.eval_return_logits = aside

    def _take_batch_size(self, samples: int | None) -> None:
        """That of a step that is done again; the script may have changed it since."""
        if samples not in (None, self.train_batch_size()):
            self.set_train_batch_size(samples)

    def _train_iteration(self) -> None:
        raise NotImplementedError


class KnownMemory:
    """What a worker that joins has to know of the states that the job may go back to."""

    def __init__(self, engine: RedoingEngine) -> None:
        self._engine = engine

    def to_json(self) -> dict[str, Any]:
        """As values that can be sent."""
        memory = self._engine.memory
        progress = MemoryProgress() if memory is None else memory.progress
        return {
            "progress": progress.to_json(),
            "plain_from": self._engine.history.plain_from,
            "unseen": self._engine.activity.unseen,
            "others": [] if self._engine.stored is None else self._engine.stored.to_json(),
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`, where the job's step is known.

        What others have done before this worker came it could do again only with data that can be had from any step on.
        """
        engine = self._engine
        engine.forget_memory()
        engine.activity.unseen = int(value["unseen"])
        if engine.memory is not None:
            engine.memory.progress = MemoryProgress.from_json(value["progress"])
        if engine.stored is not None:
            engine.stored.take(value["others"])
        if engine.data.covers_every_pipeline:
            engine.history.first = min(engine.history.first, int(value["plain_from"]))
