"""A worker that comes to a running job: its script begins at step 0, the job is far beyond.

Everybody waits for a member. So the job learns of the worker only when its script has finished its preparations, for
example reading data: when the script asks for ``global_steps``, or, if it counts by itself, when it has called
``train_batch`` as often as the job has trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepspeed_bamboo.errors import CheckpointError, ExpelledError, JobStoppedError
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.checkpoint.beginning import Loaded
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.checkpoint.stage_files import StageFiles
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.job.past_results import CALL
from deepspeed_bamboo.runtime.script_position import Phase
from deepspeed_bamboo.runtime.stock.script_call import script_call

# This worker catches up to here while the job continues; for the rest the job waits.
_NEAR_STEPS = 3
_MOST_LOOKS = 10
_LOOK_SECONDS = 0.2
_NOTHING: Loaded = (None, None)


class LateWorker(CatchingUp):
    """See the module. OUTSIDE the job does not know of this worker.

    Args:
        parts: see there.
        join: makes this worker one of the job's; calls its argument once the job's numbers are known.
        files: reads what the script has saved itself.
    """

    def __init__(self, parts: ScriptParts, *, join: Callable[[Callable[[], None]], None], files: StageFiles) -> None:
        super().__init__(parts)
        self._join = join
        self._files = files
        self._resumed: int | None = None  # the call at which its loop begins, after loading the script's own checkpoint
        self._looks = 0
        # Of what this script's loads before its first call were, and what the job's have returned.
        self._given: tuple[tuple[str, Loaded], ...] = ()

    def begin(self) -> None:
        """The script's own steps begin."""
        self._learn()
        self._position.phase = Phase.OUTSIDE
        self.answers = True

    def _learn(self) -> bool:
        """How the job's script began, as far as that is published; returns whether it is."""
        published = self._beginning.look(self._worker.session.coordinator)
        self._position.begin_at(self._first)
        return published

    @property
    def _first(self) -> int:
        """The call that this script begins with."""
        return self._beginning.first if self._resumed is None else self._resumed

    @property
    def is_behind(self) -> bool:
        """Whether what the script does now belongs to what the job has done before."""
        return not self._position.inside

    def _take_part(self) -> None:
        self._join(self._start_data)
        self._position.reached = self._beginning.call_of(self._worker.step)

    def _start_data(self) -> None:
        for number, (wanted, (path, _)) in enumerate(self._given):
            returned = self._beginning.returned(number, at=self._beginning.first, wanted=wanted) or _NOTHING
            if (returned[0] is None) != (path is None):
                raise ExpelledError(
                    f"worker {self._worker.me} had not heard what load_checkpoint returned when the job began; its "
                    "agent starts another one"
                )
        self._position.begin_at(self._first)
        self._feed.data.start_at(self._worker.step, used=self._feed.used(since=self._first))

    def _answer(self, number: int, asked: Asked) -> Loaded:
        """(None, None) where the job loaded nothing, as where there is no checkpoint: the state comes from the others.

        If the script has saved since, and did not load that when the job began: what it saved, and its loop begins
        there.
        Waits until the job has loaded, or trains. Raises JobStoppedError when it ends before.
        """
        if self._position.calls > self._position.began:
            return self._answer_between(number, asked)
        self._wait_for_the_job(self._learn)
        coordinator = self._worker.session.coordinator
        at, wanted = self._position.calls, asked.wanted if asked.whole else ""
        found = self._beginning.returned(number, at=at, wanted=wanted)
        self._given = (*self._given, (wanted, found or _NOTHING))
        other = self._beginning.returned(number, at=at) is not None
        if found is None and asked.whole and (other or self._position.untouched):
            found = self._resume(asked, (coordinator.status() or {}).get("step", -1) + 1)
        return found or _NOTHING

    def _wait_for_the_job(self, known: Callable[[], bool]) -> None:
        """Until ``known``, or the job trains. Raises JobStoppedError when it ends before."""
        session, coordinator = self._worker.session, self._worker.session.coordinator
        while not known() and coordinator.status() is None:
            if session.finished or coordinator.finished() is not None:
                raise JobStoppedError(f"job {coordinator.job} was complete before this worker could join it")
            time.sleep(_LOOK_SECONDS)

    def _before_unknown(self, number: int) -> None:
        """The others publish what they evaluate with the next step. Where they are, this worker becomes one of them.

        They are in ``train_batch`` then, and have done all evaluations before that; it learns those on joining.
        """
        position = self._position
        if position.phase is not Phase.OUTSIDE:
            return
        if position.calls == position.began:
            self._wait_for_the_job(lambda: self._known_evaluation(number) is not None)
        elif self._has_to_enter():
            written = self._writes.written()
            self.enter(counts_by_itself=True)
            if position.inside:  # what else its script does before its next step, the others have done, too
                position.phase = Phase.CATCHING_UP
                self._writes.go_back(written)

    def _answer_between(self, number: int, asked: Asked) -> Loaded:
        """The same of a load after some calls, by which the job may have gone back; or a load with all others."""
        if self._position.phase is Phase.OUTSIDE and self._position.calls >= self._position.reached:
            self.enter(counts_by_itself=True)
        if not self._position.inside and self._position.phase is Phase.OUTSIDE:
            self._learn()
        found = self._beginning.returned(number, at=self._position.calls)
        if found is None and self._position.inside:
            self.answers = False
            return asked.load()
        return found or _NOTHING

    def _resume(self, asked: Asked, reached: int) -> Loaded | None:
        """What the script has saved itself, if that is of this job, which has come to ``reached``."""
        try:
            found = self._files.resume(asked.folder, asked.tag, together=False)
        except CheckpointError as error:
            raise ExpelledError(
                f"worker {self._worker.me} came while the script's own checkpoint could not be read ({error}); its "
                "agent starts another one"
            ) from error
        if found is None or found.step > reached:
            return None
        if self._position.untouched:  # otherwise it goes by the job's step
            self._resumed = self._beginning.call_before(found.step, saved=found.call)
            self._position.begin_at(self._resumed)
        tell(
            self._worker,
            f"load_checkpoint returns what the script saved after step {found.step} and loads nothing: the state comes "
            "from the others",
        )
        return found.path, found.client_state

    def _has_to_enter(self) -> bool:
        """Not before it has called as often as the job has trained: from then on the others wait for it."""
        if self._position.calls >= self._position.reached:
            self._look()
        return self._position.calls >= self._position.reached

    def _look(self) -> None:
        """Where the job is now; nowhere new when this worker is so near, or so slow, that it had better join."""
        self._learn()
        position = self._position
        status = self._worker.session.coordinator.status() or {}
        step = int(status.get("step", -1)) + 1
        call = int(status[CALL]) + 1 if CALL in status else step
        position.loss = float(status.get("loss", math.nan))
        self._looks += 1
        if call - position.calls > _NEAR_STEPS and self._looks <= _MOST_LOOKS:
            if self._looks == 1:
                tell(
                    self._worker,
                    f"this worker joins a job at step {step}: train_batch returns at once for those before, "
                    "with the losses that they had, and so does eval_batch",
                )
            position.reached = call

    def before_activity(self) -> None:
        """The others wait for a member, so it becomes one now."""
        if self._position.phase is Phase.OUTSIDE:
            self.enter(counts_by_itself=False)

    @property
    def is_on_its_way(self) -> bool:
        """Also before the job knows of it."""
        return self._position.phase is not Phase.INSIDE and not self._position.untouched

    @property
    def is_alone(self) -> bool:
        """Until it is at the job's step. The others did it before, and train now."""
        return not self._position.inside

    def calls_alone(self, name: str = "") -> bool:
        """True until it is at the job's step; a line says so at the first call whose result a script may use."""
        if not self.is_alone:
            return False
        call = script_call(name)
        if call.decides:
            self.says(
                "alone",
                f"this worker came late, and its script calls {call.name} ({call.where}) for what the others have done "
                "before: the result is of this worker's own values alone, and what the script decides by it (a rate, "
                "an early stop) may differ from the others from now on. Loop by engine.global_steps, or decide by what "
                "train_batch and eval_batch return; engine.catching_up is true here",
            )
        return True

    def check_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Raise ExpelledError where nobody can know to which step ``iterator`` belongs."""
        if self._feed.data.would_guess(iterator):
            raise ExpelledError(
                f"worker {self._worker.me}, which came late, is given another data iterator than before: in a loop by "
                "engine.global_steps nobody can know to which step it belongs. Its agent starts another one, which "
                "gets its data from the others"
            )

    def where_data_end(self) -> AbstractContextManager[None]:
        """Inside, an iterator that ends is a loss of this worker only: those of the others may have more."""
        return self._leaving_where_data_end()

    @contextmanager
    def _leaving_where_data_end(self) -> Iterator[None]:
        try:
            yield
        except StopIteration as error:
            raise ExpelledError(
                f"worker {self._worker.me}, which came late, has no more data where the others have: {error}. In a "
                "loop by engine.global_steps nobody can know which epoch an iterator is of: let the script count its "
                "steps, or give one iterator that begins again (deepspeed.utils.RepeatingLoader)"
            ) from error

    @property
    def leaves_at_once(self) -> bool:
        """A script that ends before it came to the job's step just leaves."""
        return self._position.phase is Phase.OUTSIDE
