"""The engine of a worker that comes to a running job: its script begins at step 0, the job is far beyond.

The job hears of the worker only when the script has done whatever it does first, reading its data for example: once
it is a member everybody waits for it. That is when the script asks for ``global_steps``, or, in one that counts by
itself, when it has called ``train_batch`` as often as the job has trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.catching_up import CatchingUpEngine, Phase
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.membership.joining import check_grid, join
from deepspeed_bamboo.runtime.membership.own_facts import check_same_job

# Up to here the job is caught up with while it goes on; the rest of the way it waits for this worker.
_NEAR_STEPS = 3
_MOST_LOOKS = 10


class LateEngine(CatchingUpEngine):
    """See the module. OUTSIDE the job does not know of this worker."""

    _looks = 0

    def _begin(self, grid: Grid) -> None:
        check_grid(self.session, grid)
        check_same_job(self)
        if self.checkpoints is not None:
            self.checkpoints.check_visible()
        self._phase = Phase.OUTSIDE

    def _take_part(self) -> None:
        join(self.worker, reconfiguration=self.reconfiguration, common=self.common, known=self._start_data)
        self._reached = self.global_steps

    def _start_data(self) -> None:
        self.data.start_at(self.worker.step, micro_batches=self.micro_batches)

    def _has_to_enter(self) -> bool:
        """Not before it has called as often as the job has trained: from then on the others wait for it."""
        if self._calls >= self._reached:
            self._look()
        return self._calls >= self._reached

    def _look(self) -> None:
        """Where the job is now; nowhere new when this worker is so near, or so slow, that it had better join."""
        status = self.session.coordinator.status() or {}
        step = int(status.get("step", -1)) + 1
        self._loss = float(status.get("loss", math.nan))
        self._looks += 1
        if step - self._calls > _NEAR_STEPS and self._looks <= _MOST_LOOKS:
            if self._looks == 1:
                tell(self, f"this worker joins a job at step {step}: train_batch returns at once for those before")
            self._reached = step

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """(None, None), as where there is no checkpoint: a late worker's state comes from the others."""
        return super().load_checkpoint(*arguments, **options) if self._phase is Phase.INSIDE else (None, None)

    def perform(self, kind: str, body: Callable[[], None]) -> None:
        """As on the others, once this worker is one of them."""
        if self._phase is Phase.OUTSIDE:
            self._enter(counts_by_itself=False)
        super().perform(kind, body)

    def close(self) -> None:
        """As on the others; a script that ends before it came to the job's step just leaves."""
        if self._phase is Phase.OUTSIDE:
            self.leave()
        else:
            super().close()
