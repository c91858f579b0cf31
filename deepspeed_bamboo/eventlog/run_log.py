"""A training script's side of the event log, with BambooPipelineEngine and with DeepSpeed's own.

BambooPipelineEngine logs what happens by itself and offers ``log_event``, ``event_log``, ``epoch``,
``is_reporter``, ``state_digest`` and ``barrier``. DeepSpeed's engine has none of these: then steps are logged from
here, process 0 reports, and no digest is computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepspeed_bamboo.eventlog.log import EventLog


class RunLog:
    """A training loop calls this around ``engine.train_batch``. Every worker has one."""

    def __init__(
        self,
        engine: Any,
        *,
        directory: str | os.PathLike[str] | None,
        barrier: Callable[[], object] | None = None,
        run: Callable[[], str] | None = None,
    ) -> None:
        """``directory``: where events go when the engine logs none itself; None: nowhere.

        ``barrier``: waits for all workers, used at the end with an engine that offers none.
        ``run``: returns a name for this run, the same on all workers; called where the engine logs nothing itself.
        """
        self._engine = engine
        self._barrier = barrier
        self._own: EventLog | None = None
        if not hasattr(engine, "log_event"):
            named = None if run is None else run()
            self._own = EventLog(directory, f"rank{engine.global_rank}", run=named)
        self._seen = 0

    @property
    def is_reporter(self) -> bool:
        """True on the one worker that prints; may change when a worker is lost."""
        return bool(getattr(self._engine, "is_reporter", self._engine.global_rank == 0))

    @property
    def epoch(self) -> int:
        """The number of the current membership."""
        return int(getattr(self._engine, "epoch", 0))

    @property
    def run(self) -> str | None:
        """The name that tells this run's events from others' in the same directory, or None."""
        return getattr(getattr(self._engine, "event_log", self._own), "run", None)

    def step(self, step: int, *, loss: float, samples: int, seconds: float) -> None:
        """Log a step, unless the engine has."""
        if self._own is not None:
            self._own.log("step", epoch=0, step=step, loss=loss, samples=samples, seconds=seconds)

    def news(self) -> list[str]:
        """One line per failover that the engine has logged since the last call."""
        event_log = getattr(self._engine, "event_log", None)
        if event_log is None:
            return []
        self._seen, events = event_log.recent(self._seen)
        return failover_lines(events)

    def finish(self, loss: float | None) -> str | None:
        """Log the end of the run on every worker; returns the digest of its state, or None without one.

        ``loss``: of the last step that this worker took part in, None when it took part in none.
        Collective: all workers call it, and when it returns each has written its last event.
        """
        engine, digest = self._engine, None
        if hasattr(engine, "state_digest"):
            digest = str(engine.state_digest())
        if loss is not None and self._own is not None:
            self._own.log("finished", epoch=0, step=int(engine.global_steps), loss=loss, digest=digest)
        elif loss is not None:
            engine.log_event("finished", loss=loss, digest=digest)
        barrier = getattr(engine, "barrier", self._barrier if self._own is not None else None)
        if barrier is not None:
            barrier()
        return digest


def failover_lines(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """A plain line for each failover among ``events``. Pauses differ by worker: ``ds_bamboo compare`` has the job's."""
    return [_failover_line(event) for event in events if event["event"] == "failover"]


def _failover_line(event: Mapping[str, Any]) -> str:
    lost = ", ".join(map(str, event.get("lost", ()))) or "?"
    return f"step {event['step']}: failover, {lost} lost and taken over; epoch {event['epoch']}"
