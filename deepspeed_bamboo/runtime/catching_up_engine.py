"""The engine of a worker whose script begins at step 0 while its job is at a later step, see ``catching_up.py``.

It is that of a worker that joins late (``late_worker.py``), and of a job that may continue from a checkpoint
(``restored_job.py``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.checkpoint.beginning import BATCH, MICRO_OFFSET
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.engine import BambooPipelineEngine
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.data_streams import STREAMS
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.late_worker import LateWorker
from deepspeed_bamboo.runtime.membership.joining import check_grid, join
from deepspeed_bamboo.runtime.membership.own_facts import check_same_job
from deepspeed_bamboo.runtime.restored_job import RestoredJob
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition

_NO_LOGITS = (
    "eval_batch(return_logits=True) for a step that the job did before returns the loss that it had, and None in place "
    "of logits, on the last stage, too: nobody has them any more. Write `if logits is not None:` around their use, "
    "or loop by engine.global_steps; engine.catching_up is true here"
)
_WEIGHTS_OF_NOW = (
    "the script looks at the model's parameters at steps that the job did before: they are those of now, not of these "
    "steps. An average of weights that it keeps (EMA, SWA), a norm or a copy comes out otherwise than in a job that "
    "nothing interrupted. Keep averages in buffers of the layers, which are restored; engine.catching_up is true here"
)


class CatchingUpEngine(BambooPipelineEngine):
    """See the module. Until it is built its script counts as being where the job is."""

    _made_catching_up: CatchingUp | None = None
    _gave_no_logits = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.position = ScriptPosition()
        super().__init__(*args, **kwargs)

    def _begin(self, grid: Grid) -> None:
        parts = ScriptParts(
            self.worker,
            position=self.position,
            writes=self.script_writes,
            feed=self.feed,
            batch=self.batch_of_job,
            beginning=self.beginning,
        )
        if self.session.identity.joining:
            check_grid(self.session, grid)
            check_same_job(self)
            if self.checkpoints is not None:
                self.checkpoints.check_visible()
            self._made_catching_up = late = LateWorker(parts, join=self._join, files=self.stage_files)
            self.script_groups.alone = late.calls_alone
            late.begin()
            return
        super()._begin(grid)
        if self.checkpoints is None:
            raise RuntimeError("a job without checkpoints has no need of this engine")
        restored = RestoredJob(
            parts,
            checkpoints=self.checkpoints,
            files=self.stage_files,
            stored=self.stored,
            seeded=self._take_seed,
        )
        self._made_catching_up = restored
        restored.begin()

    def _join(self, known: Callable[[], None]) -> None:
        join(self.worker, reconfiguration=self.reconfiguration, common=self.common, known=known)

    def _take_seed(self, state: dict[str, Any]) -> None:
        self.forward_seed = state.get("seed", self.forward_seed)
        for replica in self.worker.host.replicas():
            replica.micro_offset = int(state.get(MICRO_OFFSET, replica.micro_offset))
        self.data_streams.take(state.get(STREAMS, {}))
        for changed in self.batch_of_job.restore(state.get(BATCH, {})):
            tell_once(self.worker, changed)

    @property
    def _catching_up(self) -> CatchingUp:
        if self._made_catching_up is None:
            raise RuntimeError("the engine is not ready")
        return self._made_catching_up

    @property
    def global_steps(self) -> int:
        """The job's iterations; a script that asks for it first counts by it.

        On a late worker that is the moment at which it enters the job: the script chooses its data by this number.
        """
        if self.position.untouched:
            self._catching_up.enter(counts_by_itself=False)
        if self.position.inside:
            return int(self.__dict__["global_steps"])
        return self._catching_up.step

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.__dict__["global_steps"] = count

    @property
    def catching_up(self) -> bool:  # type: ignore[override]
        """True while a script that counts its steps itself has yet to come to the job's step."""
        return self._made_catching_up is not None and self._made_catching_up.is_on_its_way

    def _shown_to_script(self) -> list[Any] | None:
        """As stock's; a line says that these are not the weights of the step at which the script is."""
        shown: list[Any] | None = super()._shown_to_script()
        if shown is not None and self.catching_up:
            self._catching_up.says("weights", _WEIGHTS_OF_NOW)
        return shown

    def calls_alone(self) -> bool:
        """Whether a collective that the script calls now concerns this worker alone."""
        return self._made_catching_up is not None and self._made_catching_up.calls_alone()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """As stock's, and surviving losses; the loss that it had for an iteration that the job did before."""
        if self._catching_up.is_before_its_time():
            loss = self._catching_up.past_loss()
            self.data.pass_by(data_iter, micro_batches=self.micro_batches, transform=self.batch_fn)
            return torch.tensor(loss, device=self.device)
        self._catching_up.answers = False
        self.position.trained = True
        return super().train_batch(data_iter)

    def eval_batch(self, data_iter: Iterator[Any] | None, return_logits: bool = False, **arguments: Any) -> Any:  # type: ignore[override]
        """As stock's; what it was where the job evaluated before, not a number where that isn't known."""
        if not self._catching_up.passes_evaluation_by():
            noted = self.position.phase is not Phase.OUTSIDE or not self._catching_up.is_beyond
            with self.position.unnoticed(), nullcontext() if noted else self.session.past.leaving_out():
                return super().eval_batch(data_iter, return_logits, **arguments)
        # One iterator may serve all evaluations; the others' has gone on.
        count = arguments.get("num_micro_batches") or self.micro_batches
        self.evaluated.skip(data_iter, count, transform=self.batch_fn)
        loss = torch.tensor(self._catching_up.past_evaluation(), device=self.device)
        if not return_logits:
            return loss
        if self.is_last_stage():
            self._gave_no_logits = True
            self._catching_up.says("logits", _NO_LOGITS)
        return loss, None

    def cause_of(self, error: Exception) -> ConfigError | None:
        """As others'; of a script that takes None for logits."""
        took_none = isinstance(error, (AttributeError, TypeError)) and "NoneType" in str(error)
        return ConfigError(_NO_LOGITS) if self._gave_no_logits and self.catching_up and took_none else None

    def get_global_grad_norm(self) -> float | None:
        """As stock's; not a number where this worker has trained nothing yet, and the job has: a line says so."""
        if not self.position.only_passed_by:
            norm: float | None = super().get_global_grad_norm()
            return norm
        self._says_unknown("get_global_grad_norm", "not a number")
        return math.nan

    def get_additional_losses(self) -> Any:
        """As stock's; those that it had for an iteration that the job did before, not a number where none are known."""
        if not self.position.only_passed_by:
            return super().get_additional_losses()
        found = self._catching_up.past_additional_losses()
        if not found:
            found = dict.fromkeys(self.module.get_additional_losses() or (), math.nan)
        if any(map(math.isnan, found.values())):
            self._says_unknown("get_additional_losses", "not a number")
        return OrderedDict((name, torch.tensor(loss, device=self.device)) for name, loss in found.items()) or None

    def was_step_applied(self) -> bool:
        """As stock's; False where this worker has trained nothing yet, and the job has: a line says so."""
        if self.position.only_passed_by:
            self._says_unknown("was_step_applied", "False")
        return bool(super().was_step_applied())

    def _says_unknown(self, method: str, returned: str) -> None:
        self._catching_up.says(
            method,
            f"{method} is not known of steps that the job did before, and returns {returned} for them: what the "
            "script decides by it (a rate, a stop) may differ from what it was then, from now on. Decide by the loss "
            "that train_batch returns, or loop by engine.global_steps",
        )

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
        """As stock's; before this worker trains nothing is loaded that is older than the job's state.

        Then it returns what it returned when the job began. If the script did not load then, and has saved since, it
        returns what was saved, and the script counts from there.
        """
        stock = super().load_checkpoint

        def load() -> Any:
            return stock(load_dir, tag, *arguments, **options)

        if not self._catching_up.answers:
            return load()
        return self._catching_up.next_load(Asked.of(load_dir, tag, arguments, options, load))

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """As stock's; nothing where the job saved one before: the state of then is not there any more."""
        if self._catching_up.passes_save_by(*_place_of(*arguments, **options)):
            return True
        with self.position.unnoticed():
            saved = super().save_checkpoint(*arguments, **options)
        self.last_state.note_saved()
        return saved

    def refresh_shadows(self) -> None:
        """As on the others; nothing where they did it before: what has come here since is what owners have."""
        if not self._catching_up.is_behind:
            with self.position.unnoticed():
                super().refresh_shadows()

    def barrier(self) -> None:
        """Wait for the others, unless they have been here before."""
        if not self._catching_up.is_behind:
            with self.position.unnoticed():
                super().barrier()

    def state_digest(self) -> str:
        """Of the job's state; empty where it was computed before."""
        if self._catching_up.is_behind:
            return ""
        with self.position.unnoticed():
            return super().state_digest()

    def agree_on(self, kind: str, value: Callable[[], Any]) -> Round:
        """As on the others; on a late worker that is not at their step its own value alone, and a line says so."""
        if self._catching_up.calls_alone("engine.agree_on"):
            return {self.worker.me: value()}
        return super().agree_on(kind, value)

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """As on the others; empty on a late worker that is not at their step. Those of a job that continues are of now,
        which a line says.
        """
        if self._catching_up.is_alone:
            return {}
        if self.catching_up or (self._catching_up.is_beyond and self.position.untouched):
            self._catching_up.says("weights", _WEIGHTS_OF_NOW)
        return super().whole_state_dict()

    @property
    def is_behind(self) -> bool:
        """Whether the job was here before and trained on, so that what there was to be saved is not there any more."""
        catching_up = self._made_catching_up
        return catching_up is not None and catching_up.is_behind and self.position.calls < self.position.reached

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """As stock's. Raises ExpelledError on a late worker where nobody can know where ``iterator`` belongs."""
        if self._made_catching_up is not None:
            self._made_catching_up.check_iterator(iterator)
        super().set_dataiterator(iterator)

    def _next_batch(self) -> Any:
        with self._catching_up.where_data_end():
            return super()._next_batch()

    def complete_data(self) -> None:
        """Pull what others need of this iteration's data."""
        with self._catching_up.where_data_end():
            super().complete_data()

    def perform(self, kind: str, body: Callable[[], None]) -> None:
        """As on the others, once this worker is one of them."""
        if self._made_catching_up is not None:
            self._made_catching_up.before_activity()
        super().perform(kind, body)

    def close(self) -> None:
        """As on the others; a script that ends before a late worker came to the job's step just leaves."""
        if self._catching_up.leaves_at_once:
            self.leave()
            return
        with self._catching_up.at_close():
            super().close()


def _place_of(save_dir: Any, tag: Any = None, *_: Any, **__: Any) -> tuple[Any, Any]:
    return save_dir, tag
