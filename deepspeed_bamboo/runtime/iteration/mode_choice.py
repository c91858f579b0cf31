"""The mode in which iterations are planned; with ``redundancy.mode: "auto"`` it is chosen while the job runs.

The reporter decides. It sends its choice with the agreement of an iteration, so every worker has it at the same
boundary, and uses it from the next iteration on. All workers measure, since any of them may become the reporter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.utils import logger

from deepspeed_bamboo.core.choosing import Choice, Figures, choose, loss_rate, middle, predict
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.runtime.iteration.worker import Worker

AUTO = "auto"

# Undisturbed iterations in a mode before it is judged.
_WARM_UP = 5
# Iterations between two looks when nothing is lost.
_LOOK_EVERY = 100
_KEPT = 50
# Older losses say nothing about the current rate. Before a job is as old as the second, a loss is no rate.
_WINDOW_SECONDS = 3600.0
_LEAST_SECONDS = 60.0


class ModeChoice:
    """One worker's view of it. ``mode`` is the same on all workers in any one iteration."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        redundancy = worker.session.config.redundancy
        self.automatic = redundancy.mode == AUTO
        self.mode = Mode.LAZY if self.automatic else Mode(redundancy.mode)
        self._eager = Mode.planned(Mode.EAGER.value, offload=redundancy.offload, overlap=redundancy.overlap)
        self.reason = "" if self.automatic else "configured"
        self._expected_per_hour = redundancy.losses_per_hour
        self._began = time.time()
        self._losses: deque[float] = deque(maxlen=10000)
        self._iterations: dict[Mode, deque[float]] = {mode: deque(maxlen=_KEPT) for mode in (Mode.LAZY, Mode.EAGER)}
        # What repeating the work of one lost worker took, by mode.
        self._repeating: dict[Mode, deque[float]] = {mode: deque(maxlen=_KEPT) for mode in (Mode.LAZY, Mode.EAGER)}
        self._own_repeating: tuple[str, float] | None = None
        self._ended_at: float | None = None
        self._since_look = 0
        self._look_soon = True

    @property
    def planned(self) -> Mode:
        """``mode``, as plans have it."""
        return self._eager if self.mode is Mode.EAGER else self.mode

    # -- what is measured --------------------------------------------------------------------------

    def lost(self, count: int) -> None:
        """So many workers were lost just now."""
        self._losses.extend([time.time()] * count)
        self._look_soon = True
        self.disturb()

    def repeated(self, seconds: float) -> None:
        """This worker took over, and needed so long to come to where the lost one had been."""
        self._own_repeating = (self.mode.value, seconds)

    def disturb(self) -> None:
        """The iteration that runs takes longer than others, for a reason of its own."""
        self._ended_at = None

    # -- the choice --------------------------------------------------------------------------------

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        if not self.automatic:
            return {}
        value: dict[str, Any] = {}
        if self._own_repeating is not None:
            value["repeated"] = self._own_repeating
        if self._worker.is_reporter and self._is_due():
            value["mode"] = self._choice()
        return value

    def note(self, agreed: Iterable[Mapping[str, Any]]) -> None:
        """At the end of an iteration: take over what was agreed with it, the same on every worker."""
        if not self.automatic:
            return
        now = time.perf_counter()
        if self._ended_at is not None:
            self._iterations[self.mode].append(now - self._ended_at)
        self._ended_at = now
        self._since_look += 1
        self._own_repeating = None
        for value in agreed:
            if value.get("repeated") is not None:
                mode, seconds = value["repeated"]
                self._repeating[Mode(mode)].append(seconds)
            if value.get("mode") is not None:
                self._adopt(value["mode"])

    def _adopt(self, choice: Choice) -> None:
        before, self.mode = self.mode, choice.mode
        first, self.reason = not self.reason, choice.reason
        self._since_look, self._look_soon = 0, False
        if choice.mode is not before:
            # The first of a new mode sets things up.
            self.disturb()
        if (first or choice.mode is not before) and self._worker.is_reporter:
            logger.info("redundancy mode %s", choice.reason)
            self._worker.log_event("mode", mode=choice.mode.value, before=before.value, reason=choice.reason)

    def _is_due(self) -> bool:
        if len(self._iterations[self.mode]) < _WARM_UP:
            return False
        return self._look_soon or self._since_look >= _LOOK_EVERY

    def _choice(self) -> Choice:
        worker = self._worker
        predicted = predict(worker.placement, micro_batches=worker.micro_batches, eager=self._eager)
        lazy, eager = (middle(self._iterations[mode]) for mode in (Mode.LAZY, Mode.EAGER))
        measured = lazy is not None and eager is not None
        if lazy is None:
            lazy = (eager or 0.0) / (1.0 + predicted.eager_overhead)
        overhead = max(0.0, eager - lazy) if measured and eager is not None else predicted.eager_overhead * lazy
        slow, fast = (middle(self._repeating[mode]) for mode in (Mode.LAZY, Mode.EAGER))
        compared = slow is not None and fast is not None
        saved = max(0.0, slow - fast) if slow is not None and fast is not None else predicted.saved_per_loss * lazy
        known = {True: "measured", False: "predicted"}
        return choose(
            Figures(lazy, overhead, self._rate(), saved),
            current=self.mode,
            notes=f"overhead {known[measured]}, saving {known[compared]}",
        )

    def _rate(self) -> float:
        now = time.time()
        seconds = min(max(now - self._began, _LEAST_SECONDS), _WINDOW_SECONDS)
        recent = sum(at > now - _WINDOW_SECONDS for at in self._losses)
        return loss_rate(recent, seconds=seconds, expected_per_hour=self._expected_per_hour)

    # -- for those who join ------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know, for :meth:`take`."""
        return {
            "mode": self.mode.value,
            "reason": self.reason,
            "began": self._began,
            "losses": list(self._losses),
            "iterations": {mode.value: list(values) for mode, values in self._iterations.items()},
            "repeating": {mode.value: list(values) for mode, values in self._repeating.items()},
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Go on with what the others know."""
        self.mode, self.reason, self._began = Mode(value["mode"]), value["reason"], value["began"]
        self._losses.extend(value["losses"])
        for mine, theirs in ((self._iterations, value["iterations"]), (self._repeating, value["repeating"])):
            for mode in mine:
                mine[mode].extend(theirs[mode.value])
        self.disturb()
