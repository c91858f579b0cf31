"""The size of the job's batch, which a script may change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed_bamboo.core.job_facts import changed_settings
from deepspeed_bamboo.core.micro_batch_counts import MicroBatchCounts
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.iteration.step_history import BatchSize

_SIZES = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")


class BatchOfJob:
    """The size of the job's batch, which a script may change: known alike on all workers, and kept in checkpoints.

    Args:
        size: returns it.
        change: changes it on this worker; as :data:`BatchSize` says.
        settings: the configuration of which the size is a part.
    """

    def __init__(
        self,
        *,
        size: Callable[[], BatchSize],
        change: Callable[[int, int], None],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.size = size
        self._change = change
        self._configured = size()
        self._settings = dict(settings or {})
        self._of_job: BatchSize | None = None
        self._counts = MicroBatchCounts()

    @property
    def counts(self) -> MicroBatchCounts:
        """How many micro-batches the steps had, as far as it is known."""
        return self._counts

    def note(self, step: int, *, micro_batches: int) -> None:
        """``step`` begins, maybe again, with so many of each pipeline."""
        self._counts = self._counts.with_step(step, micro_batches)

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know, and a job that continues."""
        known = {"configured": self._configured, "settings": self._settings}
        return {"size": self.size(), "counts": self._counts.to_json(), **known}

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`; the size counts when :meth:`adopt` is called."""
        samples, of_micro_batch = value["size"]
        self._of_job = samples, of_micro_batch
        self._counts = MicroBatchCounts.from_json(value["counts"])

    def restore(self, value: Mapping[str, Any]) -> tuple[str, ...]:
        """As :meth:`take`, from a checkpoint. Returns what to say where the configuration is another one since then.

        It is meant, since somebody has changed it between two starts, so its size is the job's from now on.
        """
        if not value:  # of an older version
            return ()
        self.take(value)
        return (*self._other_settings(value.get("settings")), *self._other_size(tuple(value["configured"])))

    def _other_settings(self, before: Mapping[str, Any] | None) -> Iterator[str]:
        changed = () if before is None else changed_settings(before, self._settings, but=_SIZES)
        if changed:
            yield (
                f"the configuration is not that of the checkpoint: {'; '.join(changed)}. Training continues with what "
                "it says now, but for what the checkpoint has of optimizers and schedulers (rates, moments)"
            )

    def _other_size(self, configured: BatchSize) -> Iterator[str]:
        if configured == self._configured:
            return
        self._of_job = None
        yield (
            f"the configuration's batches have {self._configured[0]} samples ({self._configured[1]} in a micro-batch), "
            f"and had {configured[0]} ({configured[1]}) when the checkpoint was made: training continues with "
            f"{self._configured[0]}"
        )

    def adopt(self) -> str:
        """Use the job's; a script that counts by itself has set its own on the way.

        Returns what to say where the script has set yet another one, else "".
        """
        own, job = self.size(), self._of_job
        self.use(job)
        if job is None or own in (job, self._configured):
            return ""
        return (
            f"the script has set batches of {own[0]} samples ({own[1]} in a micro-batch) before it trained, and the "
            f"job's have {job[0]} ({job[1]}): training continues with {job[0]}. For another size call "
            "engine.set_train_batch_size in the loop, or change the configuration"
        )

    def use(self, size: BatchSize | None) -> None:
        """Iterations have this size from now on, on this worker; None changes nothing."""
        if size is not None and size != self.size():
            self._change(*size)


def refuse_another_size(wanted: int, *, now: int) -> None:
    """Raise ConfigError unless ``training_data`` is read in micro-batches of the ``wanted`` size ``now``."""
    if wanted == now:
        return
    raise ConfigError(
        f"engine.set_train_micro_batch_size({wanted}) was called, and training_data is read in micro-batches of {now}: "
        "DeepSpeed's loader keeps the size that it was made with, so only the count of samples would change, and a "
        "worker that takes over would read other ones. Leave the size as it is, and change the number of micro-batches "
        "(engine.set_train_batch_size); or pass batches of the size you want by an iterator, or "
        "engine.set_data_source, in place of training_data"
    )
