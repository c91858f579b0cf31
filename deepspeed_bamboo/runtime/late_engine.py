"""The engine of a worker that comes to a running job: its script begins at step 0, the job is far beyond.

Everybody waits for a member. So the job learns of the worker only when its script has finished its preparations, for
example reading data: when the script asks for ``global_steps``, or, if it counts by itself, when it has called
``train_batch`` as often as the job has trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ExpelledError, JobStoppedError
from deepspeed_bamboo.runtime.catching_up import CatchingUpEngine, Phase
from deepspeed_bamboo.runtime.checkpoint.beginning import Loaded
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.membership.joining import check_grid, join
from deepspeed_bamboo.runtime.membership.own_facts import check_same_job

# This worker catches up to here while the job continues; for the rest the job waits.
_NEAR_STEPS = 3
_MOST_LOOKS = 10
_LOOK_SECONDS = 0.2
_NOTHING: Loaded = (None, None)


class LateEngine(CatchingUpEngine):
    """See the module. OUTSIDE the job does not know of this worker."""

    _looks = 0
    _given: tuple[Loaded, ...] = ()  # what this script's loads have returned

    def _begin(self, grid: Grid) -> None:
        check_grid(self.session, grid)
        check_same_job(self)
        if self.checkpoints is not None:
            self.checkpoints.check_visible()
        self._learn()
        self._phase = Phase.OUTSIDE
        self._answers = True

    def _learn(self) -> bool:
        """How the job's script began, as far as that is published; returns whether it is."""
        published = self.beginning.look(self.session.coordinator)
        self._begin_at(self.beginning.step)
        return published

    def _take_part(self) -> None:
        join(self.worker, reconfiguration=self.reconfiguration, common=self.common, known=self._start_data)
        self._reached = self.global_steps

    def _start_data(self) -> None:
        for call, (path, _) in enumerate(self._given):
            if ((self.beginning.returned(call) or _NOTHING)[0] is None) != (path is None):
                raise ExpelledError(
                    f"worker {self.worker.me} had not heard what load_checkpoint returned when the job began; its "
                    "agent starts another one"
                )
        self._begin_at(self.beginning.step)
        self.data.start_at(self.worker.step, used=self.feed.used(since=self.beginning.step))

    def _answer(self, call: int) -> Loaded:
        """(None, None) where the job loaded nothing, as where there is no checkpoint: the state comes from the others.

        Waits until the job has loaded, or trains. Raises JobStoppedError when it ends before.
        """
        coordinator = self.session.coordinator
        while not self._learn() and coordinator.status() is None:
            if self.session.finished or coordinator.finished() is not None:
                raise JobStoppedError(f"job {coordinator.job} was complete before this worker could join it")
            time.sleep(_LOOK_SECONDS)
        found = self.beginning.returned(call) or _NOTHING
        self._given = (*self._given, found)
        return found

    def _has_to_enter(self) -> bool:
        """Not before it has called as often as the job has trained: from then on the others wait for it."""
        if self._calls >= self._reached:
            self._look()
        return self._calls >= self._reached

    def _look(self) -> None:
        """Where the job is now; nowhere new when this worker is so near, or so slow, that it had better join."""
        self._learn()
        status = self.session.coordinator.status() or {}
        step = int(status.get("step", -1)) + 1
        self._loss = float(status.get("loss", math.nan))
        self._looks += 1
        if step - self._calls > _NEAR_STEPS and self._looks <= _MOST_LOOKS:
            if self._looks == 1:
                tell(
                    self,
                    f"this worker joins a job at step {step}: train_batch returns at once for those before, "
                    "with the losses that they had, and so does eval_batch",
                )
            self._reached = step

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        if self.data.would_guess(iterator):
            raise ExpelledError(
                f"worker {self.worker.me}, which came late, is given another data iterator than before: in a loop by "
                "engine.global_steps nobody can know to which step it belongs. Its agent starts another one, which "
                "gets its data from the others"
            )
        super().set_dataiterator(iterator)

    def _next_batch(self) -> Any:
        with self._leaving_where_data_end():
            return super()._next_batch()

    def complete_data(self) -> None:
        with self._leaving_where_data_end():
            super().complete_data()

    @contextmanager
    def _leaving_where_data_end(self) -> Iterator[None]:
        """Inside, an iterator that ends is a loss of this worker only: those of the others may have more."""
        try:
            yield
        except StopIteration as error:
            raise ExpelledError(
                f"worker {self.worker.me}, which came late, has no more data where the others have: {error}. In a loop "
                "by engine.global_steps nobody can know which epoch an iterator is of: let the script count its steps, "
                "or give one iterator that begins again (deepspeed.utils.RepeatingLoader)"
            ) from error

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
