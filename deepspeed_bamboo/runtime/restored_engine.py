"""The engine of a job that goes on from a checkpoint that the plugin took (``bamboo.checkpoint``).

The script is the one that began at step 0, unchanged. It has the job's step and state once it is built, and what it
did on its way there the first time is left out, as on a worker that joins late.
"""

from __future__ import annotations

import math
import time
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.catching_up import CatchingUpEngine, Phase
from deepspeed_bamboo.runtime.checkpoint.safe_loading import no_code_from_files
from deepspeed_bamboo.runtime.job.news import tell_once


class RestoredEngine(CatchingUpEngine):
    """See the module. Where there is no checkpoint yet this is the engine of a job that begins."""

    _restored: str | None = None

    def _begin(self, grid: Grid) -> None:
        super()._begin(grid)
        if self.checkpoints is None:
            return
        tag = self.checkpoints.find()
        if tag is None:
            return
        started, written = time.perf_counter(), self.script_writes.written()
        state = self.checkpoints.restore(tag, self._load_without_code)
        self.forward_seed = state.get("seed", self.forward_seed)
        self._loss = float(state.get("loss", math.nan))
        self._reached = self.global_steps
        # The script's iterator is not at this step, as it would be in a script that loads a checkpoint itself.
        self.data.start_at(self._reached, micro_batches=self.micro_batches)
        self._restored = f"{self.session.config.checkpoint.dir}/{tag}"
        seconds = time.perf_counter() - started
        tell_once(self, f"this job goes on from step {self._reached}, from {self._restored} ({seconds:.1f} s)")
        self.session.log("fatal_restore", step=self._reached, path=self._restored, seconds=seconds)
        self.script_writes.go_back(written)
        self._phase = Phase.OUTSIDE

    def _load_without_code(self, directory: str, *, tag: str) -> tuple[str | None, Any]:
        with no_code_from_files(self):
            return self.load_whole(directory, tag=tag)

    @property
    def _is_behind(self) -> bool:
        """Before it is known how the script counts, what it does is done: all workers do it."""
        return self._phase is Phase.CATCHING_UP

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """As stock's, unless this job goes on: what a script loads before it trains is older. Its path, and no state.

        In a script that counts by itself, what it loaded on its way is not loaded again either.
        """
        if self._phase is Phase.INSIDE or self._restored is None:
            return super().load_checkpoint(*arguments, **options)
        return self._restored, {}

    def log_event(self, event: str, **fields: Any) -> None:
        """As stock's, and no sign of how the script counts."""
        if self._phase is Phase.OUTSIDE:
            with self._unnoticed():
                super().log_event(event, **fields)
        else:
            super().log_event(event, **fields)

    def close(self) -> None:
        """As stock's, also where the script did not train any more."""
        with self._unnoticed():
            super().close()
