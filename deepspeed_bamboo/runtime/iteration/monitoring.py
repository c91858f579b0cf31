"""DeepSpeed's monitors (csv, TensorBoard, wandb, comet), written by whoever reports for the job.

Every worker knows what must be written, and keeps the newest values. A worker that becomes the reporter opens the
monitors, and writes what the reporter before may have left out. In a csv file each step has one row; the other monitors
may get a step's value twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from deepspeed.monitor.monitor import MonitorMaster

from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell

Event = tuple[str, float, int]
"""Name, value, and global samples."""

_KEPT = 2  # activities: workers are one apart at most

_NEW_REPORTER = (
    "this worker stands for rank 0 from now on, and the job trains. A script that asked for its rank once, at its "
    "start, prints and writes no more from here; one that asks `engine.is_reporter` each time does"
)


class MonitoredEngine(Protocol):
    """What is written of an engine, most of it stock's."""

    worker: Worker
    monitor: Any
    global_rank: int
    global_samples: int
    mean_loss: float
    _config: Any

    def get_lr(self) -> list[float]:
        """The current learning rates."""

    def fp16_enabled(self) -> bool:
        """Whether losses are scaled."""

    def _get_optimizer_loss_scale(self) -> float | None: ...


class FollowingMonitor:
    """In the place of the engine's ``monitor``. Stock finds it off, so that nothing is written twice; the script on.

    Args:
        stock: what DeepSpeed has made, which writes on the worker that had rank 0 then.
        config: DeepSpeed's configuration of monitors.
        reports: whether this worker is the reporter now.
        script_asks: whether who asks is the script, and not the engine at its work.
    """

    def __init__(
        self,
        stock: Any,
        *,
        config: Any,
        reports: Callable[[], bool],
        wrote_first: bool,
        script_asks: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wanted = bool(stock.enabled)
        self._script_asks = script_asks
        self._config = config
        self._reports = reports
        self._writer: Any = stock if wrote_first else None
        self._follows = False  # another has written before
        self._began_as_reporter = wrote_first
        self._recent: deque[list[Event]] = deque(maxlen=_KEPT)

    @property
    def enabled(self) -> bool:
        """Whether a script that asks first writes rows of its own (:meth:`write_events`)."""
        return self.wanted and self._script_asks()

    def reports_newly(self) -> bool:
        """Whether this worker reports now, whose script had another rank at its start; True once."""
        if self._began_as_reporter or not self._reports():
            return False
        self._began_as_reporter = True
        return True

    def note(self, events: Sequence[Event]) -> None:
        """On every worker that holds a stage, after each step or evaluation: write ``events`` if it is the reporter."""
        if not self.wanted:
            return
        self._recent.append(list(events))
        self._write_if_reporter(events)

    def write_events(self, events: Sequence[Event], flush: bool = True) -> None:
        """For scripts: as DeepSpeed's, on the reporter; the others keep them, as in :meth:`note`."""
        if not self.wanted:
            return
        if not self._recent:
            self._recent.append([])
        self._recent[-1] += events
        self._write_if_reporter(events)

    def _write_if_reporter(self, events: Sequence[Event]) -> None:
        if not self._reports():
            self._writer = None  # the new reporter keeps writing; this writer would begin a new file
        elif not self._opened():
            self._write(events)

    def _opened(self) -> bool:
        """Whether this made the writer, which has written all that is kept then."""
        if self._writer is not None:
            return False
        self._writer, self._follows = MonitorMaster(self._config), True
        for kept in self._recent:
            self._write(self._not_in_files(kept))
        return True

    def _write(self, events: Sequence[Event]) -> None:
        csv = getattr(self._writer, "csv_monitor", None)
        if self._follows and csv is not None:  # heads are there, whichever of the files comes first
            names = {name for event in events if _file(csv, name := _file_name(event)).is_file()}
            csv.filenames += sorted(names - set(csv.filenames))
        self._writer.write_events(list(events))

    def _not_in_files(self, events: Sequence[Event]) -> list[Event]:
        """Those of ``events`` that the csv files of an earlier reporter lack."""
        csv = getattr(self._writer, "csv_monitor", None)
        if csv is None:
            return list(events)
        last = {event: _last_step(_file(csv, _file_name(event))) for event in events}
        return [event for event in events if (step := last[event]) is None or event[2] > step]


def _file_name(event: Event) -> str:
    return event[0].replace("/", "_").replace(" ", "_")


def _file(csv: Any, name: str) -> Path:
    return Path(csv.log_dir) / f"{name}.csv"


def _last_step(file: Path) -> int | None:
    """The step in the last whole row of ``file``; -1 if it has a head only, None if it is not there."""
    if not file.is_file():
        return None
    rows = file.read_text(encoding="utf-8").splitlines()
    numbers = [int(first) for row in rows if (first := row.partition(",")[0]).isdigit()]
    return numbers[-1] if numbers else -1


def follow_reporter(engine: MonitoredEngine, *, script_asks: Callable[[], bool]) -> FollowingMonitor:
    """Put a :class:`FollowingMonitor` in the place of what stock has made in ``engine``; ``script_asks``: see there."""
    made = FollowingMonitor(
        engine.monitor,
        config=engine._config.monitor_config,
        reports=lambda: engine.worker.is_reporter,
        wrote_first=bool(engine.global_rank == 0),
        script_asks=script_asks,
    )
    engine.monitor = made
    return made


def note_step(engine: MonitoredEngine) -> None:
    """What DeepSpeed writes after a step, and what a script that keeps ranks no longer writes."""
    if engine.monitor.reports_newly():
        tell(engine.worker, _NEW_REPORTER)
    if not engine.monitor.wanted or not engine.worker.host.replicas():
        return
    samples = engine.global_samples
    events: list[Event] = [("Train/Samples/lr", engine.get_lr()[0], samples)]
    scale = engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None
    if scale is not None:
        events.append(("Train/Samples/loss_scale", scale, samples))
    events.append(("Train/Samples/train_loss", engine.mean_loss, samples))
    engine.monitor.note(events)
