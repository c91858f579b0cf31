"""What travels with the agreement of each iteration, beside what its step needs: news of several parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.contributions import merged
from deepspeed_bamboo.runtime.checkpoint.automatic import AutomaticCheckpoints
from deepspeed_bamboo.runtime.iteration.batch_function import BatchFunction
from deepspeed_bamboo.runtime.iteration.data_streams import DataStreams
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration
from deepspeed_bamboo.runtime.owner_changes import OwnerChanges
from deepspeed_bamboo.runtime.redoing import Redoing


@dataclass(frozen=True)
class StepNews:
    """One worker's news, and what it learns of those of others.

    Args:
        worker: whose iterations.
        losses: returns those of its last stages, which even an iteration that is done again contributes.
        again: returns whether the iteration is done again, and brings no news.
        redoing, data_streams, batch_function, modes, owner_changes, checkpoints, reconfiguration: the parts; no
            checkpoints where none are kept.
    """

    worker: Worker
    losses: Callable[[], dict[Any, Any]]
    again: Callable[[], bool]
    redoing: Redoing
    data_streams: DataStreams
    batch_function: BatchFunction
    modes: ModeChoice
    owner_changes: OwnerChanges
    checkpoints: AutomaticCheckpoints | None
    reconfiguration: Reconfiguration

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes at first, before the end of an iteration adds to it."""
        losses: dict[str, Any] = {"losses": self.losses()}
        if self.again():
            return losses
        return merged(
            losses,
            self.redoing.contribution(),
            self.data_streams.contribution(),
            self.batch_function.contribution(),
            self.modes.contribution(),
            self.owner_changes.contribution(),
            self.checkpoints.contribution() if self.checkpoints is not None else {},
            self.reconfiguration.contribution(),
        )

    def take_in(self) -> None:
        """What all have handed in with the iteration that has just ended; an iteration done again brings no news."""
        if self.again():
            return
        self.reconfiguration.note()
        self.owner_changes.learn(self.worker.activity.previous[0])
        self.redoing.note()
        self.data_streams.take_in(self.worker.activity.previous[0], worker=self.worker)
        self.batch_function.take_in(self.worker.activity.previous[0])
        if self.checkpoints is not None:
            self.checkpoints.note()
