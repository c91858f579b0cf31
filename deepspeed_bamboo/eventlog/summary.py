"""The result of a run, from its merged events, and whether two runs are bitwise equal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.files import MERGED_NAME, merge_events, read_events, read_worker_files
from deepspeed_bamboo.eventlog.runs import newest_training, runs_in

PAUSE_PARTS = ("detect", "abort", "regroup", "recompute", "total")


@dataclass(frozen=True)
class FailoverSummary:
    """One failover, as the worker that took over saw it."""

    step: int
    epoch: int
    lost: tuple[str, ...]
    pause_seconds: Mapping[str, float]
    kill_to_recompute_seconds: float | None  # from a scripted fault to the first recomputed instruction
    recomputed: Mapping[str, int] = field(default_factory=dict)  # "forwards" and "backwards" done again


@dataclass(frozen=True)
class RunSummary:
    """One run: losses by step, its end, and its failovers in order.

    ``parts``: the names of the runs that these are of, where a later one continued those before; ``runs``: how many
    there are in the log.
    """

    losses: Mapping[int, float]
    final_step: int | None  # None: the run did not finish
    digest: str | None
    failovers: tuple[FailoverSummary, ...]
    parts: tuple[str, ...] = ()
    runs: int = 1

    @property
    def fall(self) -> float:
        """By which share the loss fell from the first to the last step: 0.3 is 30 %; 0 where the first is 0."""
        steps = sorted(self.losses)
        return 1 - self.losses[steps[-1]] / self.losses[steps[0]] if steps and self.losses[steps[0]] else 0.0

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write."""
        return {**asdict(self), "losses": {str(step): loss for step, loss in self.losses.items()}}


def load_run(directory: str | os.PathLike[str]) -> RunSummary:
    """The summary of the newest run whose event log is ``directory``, with the steps of those that it continues.

    The workers' files count. A merged file may be of an earlier run, and counts only where there is no other.
    Raises EventLogError when there is no run, and as newest_training does.
    """
    folder = Path(directory)
    files = read_worker_files(folder)
    if not files and (folder / MERGED_NAME).exists():
        files = {MERGED_NAME: read_events(folder / MERGED_NAME, as_written=True)}
    if not files:
        raise EventLogError(
            f"there is no event log in {folder}; name the directory that bamboo.event_log named in that run"
        )
    runs = runs_in(files)
    parts = newest_training(runs)
    merged = [merge_events(run.files) for run in parts]
    end = summarize(merged[-1] if merged else ())
    return replace(
        summarize(event for events in merged for event in events),
        final_step=end.final_step,
        digest=end.digest,
        parts=tuple(run.name for run in parts if run.name),
        runs=len(runs),
    )


def summarize(events: Iterable[Mapping[str, Any]]) -> RunSummary:
    """The summary of merged ``events``."""
    everything = list(events)
    finished = [event for event in everything if event["event"] == "finished"]
    return RunSummary(
        losses={event["step"]: event["loss"] for event in everything if event["event"] == "step"},
        final_step=finished[-1]["step"] if finished else None,
        digest=finished[-1].get("digest") if finished else None,
        failovers=_failovers(everything),
    )


def differences(reference: RunSummary, other: RunSummary) -> list[str]:
    """How ``other`` differs from ``reference``, bit by bit, one sentence each; empty if it does not."""
    found = []
    for step in sorted({*reference.losses, *other.losses}):
        one, another = reference.losses.get(step), other.losses.get(step)
        if repr(one) != repr(another):  # as text, so that NaN equals itself and -0.0 is not 0.0
            found.append(f"loss of step {step}: {_text(one)} and {_text(another)}")
    if reference.final_step is None or reference.final_step != other.final_step:
        found.append(f"last step: {_text(reference.final_step)} and {_text(other.final_step)}")
    if reference.digest is None and other.digest is None:
        found.append(
            "neither run has a digest: let your script end with engine.log_event('finished', "
            "digest=engine.state_digest())"
        )
    elif reference.digest is None or reference.digest != other.digest:
        found.append(f"digest: {_text(reference.digest)} and {_text(other.digest)}")
    return found


def _failovers(events: Sequence[Mapping[str, Any]]) -> tuple[FailoverSummary, ...]:
    """One per epoch of each run: of all survivors' reports the one of a worker that took over, or else the longest."""
    order: dict[object, int] = {}
    reports: dict[tuple[int, int], Mapping[str, Any]] = {}
    for event in events:
        number = order.setdefault(event.get("run"), len(order))
        if event["event"] != "failover":
            continue
        best = reports.get((number, event["epoch"]))
        if best is None or _weight(event) > _weight(best):
            reports[number, event["epoch"]] = event
    faults = [event for event in events if event["event"] == "fault"]
    return tuple(
        _failover(report, faults=[fault for fault in faults if fault.get("run") == report.get("run")])
        for _, report in sorted(reports.items())
    )


def _failover(report: Mapping[str, Any], *, faults: Iterable[Mapping[str, Any]]) -> FailoverSummary:
    recomputed = report.get("first_recomputed_t")
    struck = [fault["t"] for fault in faults if recomputed is not None and fault["t"] <= recomputed]
    return FailoverSummary(
        step=report["step"],
        epoch=report["epoch"],
        lost=tuple(report.get("lost", ())),
        pause_seconds=dict(report.get("pause_seconds", {})),
        kill_to_recompute_seconds=recomputed - max(struck) if struck and recomputed is not None else None,
        recomputed=dict(report.get("recomputed", {})),
    )


def _weight(report: Mapping[str, Any]) -> tuple[bool, float]:
    return bool(report.get("taken_over")), report.get("pause_seconds", {}).get("total", 0.0)


def _text(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)
