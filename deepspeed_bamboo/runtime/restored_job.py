"""A worker of a job that continues from a checkpoint that the plugin took (``bamboo.checkpoint``).

The script runs from the top, unchanged. Its engine has the job's step and state once it is built, and skips what the
first run did before that step, as on a worker that joins late.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.eventlog.costs import ANEW
from deepspeed_bamboo.protocol import REACHED
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.checkpoint.automatic import AutomaticCheckpoints
from deepspeed_bamboo.runtime.checkpoint.beginning import BEGAN, ENDED, SAVES, SEVERAL, WROTE, Loaded
from deepspeed_bamboo.runtime.checkpoint.in_place import StoredStates
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.checkpoint.stage_files import StageFiles
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.job.past_results import PAST
from deepspeed_bamboo.runtime.recovery.sources import STORE
from deepspeed_bamboo.runtime.script_position import Phase
from deepspeed_bamboo.runtime.stock.hyperparameters import Values
from deepspeed_bamboo.runtime.stock.state_versions import touched

# What says that the script has not seen what it saw then, and may have decided otherwise.
_MISSED = {"loss", "evaluation", "get_global_grad_norm", "get_additional_losses", "was_step_applied"}
_FIRST_EVALUATION = (
    "eval_batch before the first step returns what it had when this job began. To evaluate what the job has come to, "
    "ask for engine.global_steps first"
)
_NEW_IS_LOST = (
    ". What it has changed of them after the last step that the job did, and did not do then, is lost by that: do it "
    "after the next train_batch"
)
_FIRST_SAVE = (
    "save_checkpoint writes nothing before the first step: {tag!r} is there already, of when this job began, and the "
    "job is at step {step}. To save that, ask for engine.global_steps first"
)


class RestoredJob(CatchingUp):
    """See the module. Where there is no checkpoint yet the job begins.

    Args:
        parts: see there.
        checkpoints: where the state comes from.
        files: loads it.
        stored: the states that the job may go back to in place, None where there are none.
        seeded: called with the plugin's own state in the checkpoint, which has the seed.
    """

    def __init__(
        self,
        parts: ScriptParts,
        *,
        checkpoints: AutomaticCheckpoints,
        files: StageFiles,
        stored: StoredStates | None,
        seeded: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(parts)
        self._checkpoints = checkpoints
        self._files = files
        self._stored = stored
        self._seeded = seeded
        self._ended = True  # the checkpoint has what the script did after its last step
        self._saves = 0  # which of the script's saves after its last step the job did before
        self._wrote = True  # the script had written to its optimizer after that
        self._at_end: Values = ()  # what the script's optimizer held when the last step was passed by
        self._several = False  # the script had passed one data iterator after another
        self._restored: str | None = None
        self._tag = ""
        self._as_restored: dict[Coordinate, tuple[int, str]] = {}  # by stage what shows that the script changes it

    def begin(self) -> None:
        """Find the checkpoint to continue from, and load it if there is one; collective."""
        started, tag = time.perf_counter(), self._checkpoints.find()
        if tag is not None:
            self._restore(tag)
        self._tell_what_is_redone(time.perf_counter() - started)

    def _restore(self, tag: str) -> None:
        worker, position = self._worker, self._position
        started, written = time.perf_counter(), self._writes.written()
        state = self._checkpoints.restore(tag, self._files.load_without_code)
        self._tag, self._as_restored = tag, self._touched()
        self._seeded(state)
        position.loss = float(state.get("loss", math.nan))
        worker.session.past.take(state.get(PAST, {}), published=False)
        self._several, self._ended = bool(state.get(SEVERAL)), bool(state.get(ENDED, True))
        self._saves, self._wrote = int(state.get(SAVES, 0)), bool(state.get(WROTE, True))
        if self._stored is not None:
            self._stored.began_from(worker.step)
        self._beginning.take(state.get(BEGAN, {}))
        position.reached = self._beginning.call_of(worker.step)
        # The script's iterator is where it was when the job began.
        self._feed.data.start_at(worker.step, used=self._feed.used(since=self._beginning.first))
        position.begin_at(self._beginning.first)
        if self._beginning.loads:
            self._files.publish_beginning()
        self._restored = f"{worker.session.config.checkpoint.dir}/{tag}"
        seconds = time.perf_counter() - started
        tell_once(worker, f"this job goes on from step {worker.step}, from {self._restored} ({seconds:.1f} s)")
        worker.session.log("fatal_restore", step=worker.step, path=self._restored, seconds=seconds)
        self._writes.go_back(written)
        position.phase = Phase.OUTSIDE
        self.answers = True

    def _tell_what_is_redone(self, seconds: float) -> None:
        """In workers that start a job anew, of which nobody was left: how far it had come."""
        before, reached = int(os.environ.get(REACHED) or 0), self._worker.step
        if before:
            steps = max(0, before - reached)
            again = f"{steps} step is" if steps == 1 else f"{steps} steps are"
            tell_once(self._worker, f"nobody was left after {before} steps; {again} done again")
            fields = {"from_step": reached, "source": STORE, "redone": steps, "workers": [], "seconds": seconds}
            self._worker.session.log("restored", step=before, reason=ANEW, **fields)

    def enter(self, *, counts_by_itself: bool) -> None:
        """The script has shown how it counts. Raises ConfigError where nobody can know which data it has now."""
        if self._several and not counts_by_itself and not self._feed.data.covers_every_pipeline:
            raise ConfigError(
                "before its checkpoint this job's script had passed one data iterator after another, and it goes by "
                "engine.global_steps: nobody can know where the first iterator that it passes now belongs. Let the "
                "script count its steps itself (the plugin then has it pass by what was done), or pass one iterator "
                "that begins again (deepspeed.utils.RepeatingLoader), or training_data"
            )
        stages = self._changed()
        if stages and not counts_by_itself and self._position.reached > self._beginning.first:
            raise ConfigError(
                f"the script has changed weights or optimizer state of {' '.join(stages)} after initialize, and this "
                f"job goes on from step {self._worker.step} of {self._restored}: what it did when the job began "
                "would be done to what has come of it. Do it before initialize, or only `if engine.global_steps == 0:`"
            )
        super().enter(counts_by_itself=counts_by_itself)
        position = self._position
        if position.phase is Phase.CATCHING_UP:
            tell_once(
                self._worker,
                f"the script counts its steps itself: train_batch returns at once for {self._passed_by()}, with the "
                "losses that they had, and so does eval_batch",
            )

    def _passed_by(self) -> str:
        first, end = self._position.calls, self._position.reached
        if any(first < call <= end for call, *_ in self._beginning.turns):
            return f"the first {end - first} calls (it loaded an earlier step between them)"
        return f"steps {self.step} to {self.step + end - first - 1}"

    def past_loss(self) -> float:
        """As on others. A checkpoint that was taken in training was so at the end of ``train_batch``.

        So what the script does after its last call that is passed by (an evaluation, saving, writing a rate) is not in
        that state, and is done on it, by all workers.
        """
        loss = super().past_loss()
        if self._position.calls == self._position.reached and not self._ended:
            self._arrive()
            self.answers = False
        self._at_end = self._writes.written()
        return loss

    def _arrive(self) -> None:
        """What the script has changed of weights on its way there is in the job's state, and was done to that again."""
        told = self._worker.agree_on("arrival", self._changed)
        if stages := sorted({stage for changed in told.values() for stage in changed}):
            tell_once(
                self._worker,
                f"on its way to step {self._worker.step} the script has changed weights or optimizer state of "
                f"{' '.join(stages)}, as when the job did these steps: they are read from {self._restored} again"
                + (_NEW_IS_LOST if self._ended else ""),
            )
            with self._position.unnoticed():
                self._checkpoints.restore(self._tag, self._files.load_without_code)
        self._position.phase = Phase.INSIDE
        if self._ended and self._position.calls > self._position.began:
            self._come_back_beyond()
        else:
            self._writes.come_back()

    def _come_back_beyond(self) -> None:
        """What the script has written since the last step is in the job's state, unless that is new.

        Where it has come here with the values that it had then, what it holds now is what it means.
        """
        sure = self._writes.by_script_alone and not self._beginning.first and not self._beginning.turns
        sure = (sure and self._said.isdisjoint(_MISSED)) or not self._wrote
        if names := self._writes.come_back_beyond(self._at_end, sure=sure):
            self.says(
                "written",
                f"the script has written {', '.join(names)} of its optimizer before the first step that this job did "
                f"not do before, step {self._worker.step}; it did so before it ended, too, and that is kept for this "
                "step: nobody can know which of both is meant. Set it by engine.global_steps to be sure",
            )

    def _touched(self) -> dict[Coordinate, tuple[int, str]]:
        return {coordinate: touched(replica) for coordinate, replica in self._worker.host.owned.items()}

    def _changed(self) -> list[str]:
        """The stages here of which the script has changed what was restored."""
        now = self._touched()
        return sorted(str(c) for c, was in self._as_restored.items() if c in now and now[c] != was)

    @property
    def is_behind(self) -> bool:
        """Before it is known how the script counts, what it does is done: all workers do it."""
        return self._position.phase is Phase.CATCHING_UP

    @property
    def is_beyond(self) -> bool:
        """Where it continues from a checkpoint of a later step."""
        return self._restored is not None and self._position.reached > self._beginning.first

    @property
    def _is_at_end(self) -> bool:
        """After the last step of a job that had ended: what the script does may be done, or be new."""
        return self.is_behind and self._position.calls >= self._position.reached

    def passes_evaluation_by(self) -> bool:
        """Also at the beginning, where it is known what it was. After the last step those that the job did."""
        position, past = self._position, self._worker.session.past
        known = position.evaluations < past.evaluated(position.calls)
        if position.untouched and self.is_beyond and known:
            self.says("first evaluation", _FIRST_EVALUATION)
            return True
        if self._is_at_end and not known:
            self._arrive()
            self.answers = False
        return self.is_behind

    def passes_save_by(self, save_dir: Any, tag: Any) -> bool:
        """The same; at the beginning what there is already is not saved again: it is of a step before."""
        if self._position.untouched and self.is_beyond and tag is not None:
            with self._position.unnoticed():
                told = self._worker.agree_on("saved before", lambda: Path(save_dir, str(tag)).exists())
            if any(told.values()):
                self.says("first save", _FIRST_SAVE.format(tag=tag, step=self._worker.step))
                return True
        if self._is_at_end:
            self._saves -= 1
            if self._saves < 0:
                self._arrive()
                self.answers = False
        return self.is_behind

    def _answer(self, number: int, asked: Asked) -> Loaded:
        """What a script loaded when the job began is older. What it has saved since is where its loop begins now.

        It may have begun with something else (pretrained weights), since it had saved nothing then. In a script that
        counts by itself, what it loaded on its way is not loaded again either.
        """
        position, at = self._position, self._position.calls
        first = asked.whole and at == position.began
        before = self._beginning.returned(number, at=at, wanted=asked.wanted if first else "")
        if before is None and first and position.untouched:
            return self._resume(number, asked)
        what = "no state, since the script did not load there before" if before is None else "what it did then"
        if before is None and self._beginning.returned(number, at=at) is not None:
            found = self._files.resume(asked.folder, asked.tag, together=True)
            if found is not None and found.step <= self._worker.step:
                before, what = (found.path, found.client_state), f"what the script saved after step {found.step}"
        tell_once(
            self._worker,
            f"load_checkpoint reads nothing, for the job is beyond at step {self._worker.step}; it returns {what}",
        )
        return (self._restored, {}) if before is None else before

    def _resume(self, number: int, asked: Asked) -> Loaded:
        """The script saves and loads by itself, too; collective. Its newest checkpoint may be older than the job's."""
        position, found = self._position, self._files.resume(asked.folder, asked.tag, together=True)
        if found is None:
            return None, None
        if found.step > self._worker.step:
            return self._load_newer(number, asked)
        call = self._beginning.call_before(found.step, saved=found.call)
        self._beginning.resume(call, keep=number)
        loaded = found.path, found.client_state
        self._beginning.note(loaded, before=found.step, after=found.step, wanted=asked.wanted, call=call)
        self._files.publish_beginning()
        position.begin_at(call)
        self._feed.data.start_at(self._worker.step, used=self._feed.used(since=call))
        tell_once(
            self._worker,
            f"load_checkpoint returns what the script saved after step {found.step}, and loads nothing, for the job is "
            f"at step {self._worker.step}: in a loop that counts from there train_batch returns at once for the steps "
            "between",
        )
        return loaded

    def _load_newer(self, number: int, asked: Asked) -> Loaded:
        """The script's own checkpoint is newer than the job's: it is loaded as in a job that begins."""
        before, self.answers = self._worker.step, False
        self._position.phase = Phase.INSIDE
        self._writes.come_back()
        self._beginning.resume(self._position.reached, keep=number)
        loaded = asked.load()
        self._position.reached = self._beginning.call_of(self._worker.step)
        self._feed.data.start_at(self._worker.step, used=0)
        tell_once(
            self._worker,
            f"the script's own checkpoint {loaded[0]} is newer than the job's of step {before}, so it is loaded: this "
            f"job goes on from step {self._worker.step}",
        )
        return loaded

    def at_close(self) -> AbstractContextManager[None]:
        """Inside, also a script that did not train any more ends the job at the job's step."""
        return self._position.unnoticed()
