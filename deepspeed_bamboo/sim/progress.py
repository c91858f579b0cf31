"""The steps of a run. Many alike are completed at once; a step counts only at its end."""

from __future__ import annotations

from dataclasses import dataclass

from .clock import MILLISECONDS_PER_HOUR, MILLISECONDS_PER_SECOND, NEVER
from .ledger import Ledger, Mode

__all__ = ["Mark", "Progress"]


@dataclass(frozen=True)
class Mark:
    """A state to roll back to: a checkpoint."""

    steps: int = 0
    samples: int = 0
    ratio_hours: float = 0.0
    running_milliseconds: int = 0
    wasted_milliseconds: int = 0


class Progress:
    """Completed steps, and the one in flight.

    Args:
        ledger: billed as steps complete.
        samples_per_step: the global batch.
        target_steps: the run is finished after so many; None is never.
        checkpoint_milliseconds: a checkpoint is taken at the end of the first step in every such interval; 0 is never.
        memory_milliseconds: the same for checkpoints in machines' memory, which losses of many machines take with them.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        samples_per_step: int,
        target_steps: int | None,
        checkpoint_milliseconds: int = 0,
        memory_milliseconds: int = 0,
    ) -> None:
        self._ledger = ledger
        self.batch = samples_per_step
        self.target_steps = target_steps
        self.steps = 0
        self.samples = 0
        self.wasted_steps = 0
        self.wasted_milliseconds = 0
        self.dropped_samples = 0
        # Integral over time of throughput per cost: (samples/s) / ($/h) x h.
        self.ratio_hours = 0.0
        self.ends_at = NEVER
        self.first_start: int | None = None
        self.last_step_at = 0
        self.last_step_machine_milliseconds = 0
        self.last_step_dollars = 0.0
        self._stored = _Checkpoints(checkpoint_milliseconds)
        self._remembered = _Checkpoints(memory_milliseconds)
        self._step_milliseconds = 0
        self._step_samples = samples_per_step
        self._began_at = 0

    @property
    def checkpoint(self) -> Mark:
        """The newest one in the store."""
        return self._stored.newest

    @property
    def finished(self) -> bool:
        """Whether the target is reached."""
        return self.steps == self.target_steps

    @property
    def seconds_per_step(self) -> float:
        """How long a step now takes."""
        return self._step_milliseconds / MILLISECONDS_PER_SECOND

    def start(self, now: int, step_milliseconds: int, *, samples: int | None = None) -> None:
        """Begin a step, to be followed by others alike. `samples` is what each trains, by default the batch."""
        if self.first_start is None:
            self.first_start = now
            self._ledger.accrue(now)
            self._mark_step(now)
        self._step_milliseconds = step_milliseconds
        self._step_samples = self.batch if samples is None else samples
        self._began_at = now
        self.ends_at = now + step_milliseconds

    def stop(self, now: int) -> None:
        """Give up the step in flight; its time is wasted."""
        if self.ends_at != NEVER:
            self.wasted_milliseconds += now - self._began_at
            self.ends_at = NEVER

    def suspend(self, now: int) -> int:
        """Interrupt the step in flight, which is to be resumed; returns for how long it has run, in milliseconds."""
        elapsed = now - self._began_at if self.ends_at != NEVER else 0
        self.ends_at = NEVER
        return elapsed

    def hold(self) -> None:
        """Begin no further step; to be called when one has just ended."""
        self.ends_at = NEVER

    def stretch(self, now: int, factor: float) -> None:
        """From now on everything takes `factor` times as long, the rest of the step in flight included."""
        self.ends_at += int((self.ends_at - now) * (factor - 1.0))
        self._step_milliseconds = int(self._step_milliseconds * factor)

    def complete(self, *, before: int, single: bool) -> int:
        """Complete the steps that end before a time (at most one if `single`); returns when the last one ended."""
        count = 1 if single else (before - 1 - self.ends_at) // self._step_milliseconds + 1
        if self.target_steps is not None:
            count = min(count, self.target_steps - self.steps)
        began = self.last_step_at
        self._count(self.ends_at, 1)
        if count > 1:
            self._count(self.ends_at + (count - 1) * self._step_milliseconds, count - 1)
        if self._ledger.series is not None:
            self._ledger.series.samples.spread(began, self.last_step_at, count * self._step_samples)
        self._began_at = self.last_step_at
        self.ends_at = self.last_step_at + self._step_milliseconds
        return self.last_step_at

    def _count(self, end: int, count: int) -> None:
        """`count` steps alike, the last of which ends at `end`."""
        self._ledger.accrue(end)
        dollars = self._ledger.dollars - self.last_step_dollars
        ratio_hours = 0.0
        if dollars > 0.0:
            # Each of them took hours/count and cost dollars/count; see ratio_hours for the unit.
            hours = (end - self.last_step_at) / MILLISECONDS_PER_HOUR
            ratio_hours = self._step_samples * hours / (dollars * 3600.0)
        self.ratio_hours += count * ratio_hours
        self.steps += count
        self.samples += count * self._step_samples
        self.dropped_samples += count * (self.batch - self._step_samples)
        self._mark_step(end)
        for kept in (self._stored, self._remembered):
            if kept.is_due(end):
                # The first step that ended when it was due or later, counted back from the last.
                back = min((end - kept.due) // self._step_milliseconds, count - 1)
                kept.newest = self._mark(back, ratio_hours)

    def save(self) -> None:
        """Take a checkpoint now, of the last completed step."""
        self._stored.newest = self._mark(0, 0.0)

    def _mark(self, back: int, ratio_hours: float) -> Mark:
        running = self._ledger.mode_milliseconds[Mode.RUNNING]
        return Mark(
            self.steps - back,
            self.samples - back * self._step_samples,
            self.ratio_hours - back * ratio_hours,
            running - back * self._step_milliseconds,
            self.wasted_milliseconds,
        )

    def _mark_step(self, now: int) -> None:
        """Remember what was billed when a step ended, or the first began; billed up to now by the caller."""
        self.last_step_at = now
        self.last_step_machine_milliseconds = self._ledger.machine_milliseconds
        self.last_step_dollars = self._ledger.dollars

    def roll_back(self, now: int, *, in_memory: bool = False) -> None:
        """Lose all work since the last checkpoint, the step in flight included.

        Args:
            now: when.
            in_memory: back to the newest one in memory or in the store; else memory is lost, too.
        """
        self._ledger.accrue(now)
        mark = self._stored.newest
        if in_memory and self._remembered.newest.steps > mark.steps:
            mark = self._remembered.newest
        self.wasted_steps += self.steps - mark.steps
        # All that ran since is wasted, what was counted as such already included.
        running = self._ledger.mode_milliseconds[Mode.RUNNING]
        self.wasted_milliseconds = mark.wasted_milliseconds + running - mark.running_milliseconds
        if self._ledger.series is not None and self.samples > mark.samples:
            self._ledger.series.samples.spread(now - 1, now, mark.samples - self.samples)
        self.steps, self.samples, self.ratio_hours = mark.steps, mark.samples, mark.ratio_hours
        self._remembered.newest = mark if in_memory else Mark()
        self.ends_at = NEVER


class _Checkpoints:
    """When checkpoints of one kind are due, and the newest."""

    def __init__(self, every_milliseconds: int) -> None:
        self._every = every_milliseconds
        self.due = 0
        self.newest = Mark()

    def is_due(self, now: int) -> bool:
        """Whether one is, at the end of a step; then `due` says since when."""
        if not self._every or now // self._every * self._every <= self.due:
            return False
        self.due = now // self._every * self._every
        return True
