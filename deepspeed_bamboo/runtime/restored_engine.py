"""The engine of a job that continues from a checkpoint that the plugin took (``bamboo.checkpoint``).

The script runs from the top, unchanged. Its engine has the job's step and state once it is built, and skips what the
first run did before that step, as on a worker that joins late.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import REACHED
from deepspeed_bamboo.runtime.catching_up import CatchingUpEngine, Phase
from deepspeed_bamboo.runtime.checkpoint.beginning import BEGAN, SEVERAL, Loaded
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.job.past_results import PAST
from deepspeed_bamboo.runtime.recovery.sources import STORE


class RestoredEngine(CatchingUpEngine):
    """See the module. Where there is no checkpoint yet this is the engine of a job that begins."""

    _several = False  # the script had passed one data iterator after another
    _restored: str | None = None

    def _begin(self, grid: Grid) -> None:
        super()._begin(grid)
        if self.checkpoints is None:
            return
        started, tag = time.perf_counter(), self.checkpoints.find()
        if tag is not None:
            self._restore(tag)
        self._tell_what_is_redone(time.perf_counter() - started)

    def _restore(self, tag: str) -> None:
        if self.checkpoints is None:
            return
        started, written = time.perf_counter(), self.script_writes.written()
        state = self.checkpoints.restore(tag, self.stage_files.load_without_code)
        self.forward_seed = state.get("seed", self.forward_seed)
        self._loss = float(state.get("loss", math.nan))
        self._reached = self.global_steps
        self.session.past.take(state.get(PAST, {}))
        self._several = bool(state.get(SEVERAL))
        if self.stored is not None:
            self.stored.began_from(self._reached)
        self.beginning.take(state.get(BEGAN, {}))
        # The script's iterator is where it was when the job began.
        self.data.start_at(self._reached, used=self.feed.used(since=self.beginning.step))
        self._begin_at(self.beginning.step)
        if self.beginning.loads:
            self.stage_files.publish_beginning()
        self._restored = f"{self.session.config.checkpoint.dir}/{tag}"
        seconds = time.perf_counter() - started
        tell_once(self, f"this job goes on from step {self._reached}, from {self._restored} ({seconds:.1f} s)")
        self.session.log("fatal_restore", step=self._reached, path=self._restored, seconds=seconds)
        self.script_writes.go_back(written)
        self._phase = Phase.OUTSIDE
        self._answers = True

    def _tell_what_is_redone(self, seconds: float) -> None:
        """In workers that start a job anew, of which nobody was left: how far it had come."""
        before = int(os.environ.get(REACHED) or 0)
        if before:
            steps = max(0, before - self._reached)
            again = f"{steps} step is" if steps == 1 else f"{steps} steps are"
            tell_once(self, f"nobody was left after {before} steps; {again} done again")
            fields = {"from_step": self._reached, "source": STORE, "redone": steps, "workers": [], "seconds": seconds}
            self.session.log("restored", step=before, reason="workers start anew", **fields)

    def _enter(self, *, counts_by_itself: bool) -> None:
        if self._several and not counts_by_itself and not self.data.covers_every_pipeline:
            raise ConfigError(
                "before its checkpoint this job's script had passed one data iterator after another, and it goes by "
                "engine.global_steps: nobody can know where the first iterator that it passes now belongs. Let the "
                "script count its steps itself (the plugin then has it pass by what was done), or pass one iterator "
                "that begins again (deepspeed.utils.RepeatingLoader), or training_data"
            )
        super()._enter(counts_by_itself=counts_by_itself)
        if self.catching_up:
            tell_once(
                self,
                f"the script counts its steps itself: train_batch returns at once for steps {self._calls} to "
                f"{self._reached - 1}, with the losses that they had, and so does eval_batch",
            )

    @property
    def _is_behind(self) -> bool:
        """Before it is known how the script counts, what it does is done: all workers do it."""
        return self._phase is Phase.CATCHING_UP

    def _answer(self, call: int) -> Loaded:
        """What a script loads before it trains is older. Where it loads more than when the job began: this job's path.

        In a script that counts by itself, what it loaded on its way is not loaded again either.
        """
        before = self.beginning.returned(call)
        what = "no state, since the script did not load when the job began" if before is None else "what it did then"
        tell_once(
            self, f"load_checkpoint reads nothing, for the job is beyond at step {self._reached}; it returns {what}"
        )
        return (self._restored, {}) if before is None else before

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
