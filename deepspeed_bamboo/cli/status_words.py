"""A job's state in words: what ``ds_bamboo status`` says of steps, losses, checkpoints and events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.cli.job_view import JobView, number, pause_of
from deepspeed_bamboo.cli.text_layout import printable
from deepspeed_bamboo.coordination.records import EndedJob
from deepspeed_bamboo.elastic.standing_still import in_words

_FAILOVERS = 3


def heading(view: JobView) -> str:
    """Name, state and age of the job."""
    age = "" if view.age_seconds is None else f", started {duration(view.age_seconds)} ago"
    return f"job {view.job}: {view.state}{age}, {view.agents} agents{_after(view.detail)}"


def facts(view: JobView) -> list[str]:
    """What else there is to say of it, a line each. The stack of a worker that stands still has one for each call."""
    found = []
    if view.missing_slots:
        ranks = ", ".join(map(str, view.missing_slots))
        found.append(f"waiting for {len(view.missing_slots)} of {view.slots} slots to begin: {ranks}")
    if view.epoch is not None and view.epoch_seconds is not None:
        found.append(f"epoch {view.epoch}, since {duration(view.epoch_seconds)}: {view.reason}")
    if view.progress is not None:
        found.append(step_line(view))
    if view.stands_still:
        found.append("no step has ended since then: look at the workers' output")
    if view.failovers:
        last = view.failovers[-_FAILOVERS:]
        told = (f"step {one.step}{_pause(one.pause_seconds)}, {duration(one.age_seconds)} ago" for one in last)
        found.append(f"last failovers: {'; '.join(told)}")
    if view.checkpoint is not None:
        found.append(_checkpoint_line(view))
    found += [f"{worker}: {work.in_words()}" for worker, work in view.works.items()]
    for worker, hang in view.hangs.items():
        found += in_words(worker, hang).splitlines()
    for worker, speed in sorted(view.slow.items()):
        found.append(f"worker {worker} is slow: its passes take {1 / speed:.1f} times as long as before")
    for drain in view.draining:
        hurry = "" if drain.deadline_seconds is None else f", {drain.deadline_seconds:.0f} s after the request"
        found.append(f"node {drain.node} is being left{hurry}: {drain.reason}")
    return found


def step_line(view: JobView) -> str:
    """Where the job is, and how fast."""
    progress = view.progress or {}
    parts = [f"step {progress['step']}"]
    if isinstance(progress.get("loss"), float):
        parts.append(f"loss {progress['loss']:.4f}")
    seconds = number(progress.get("seconds"))
    if seconds is not None:
        parts.append(f"{seconds:.3g} s a step")
    if view.mode is not None:
        parts.append(f"mode {view.mode}")
    parts.append(f"{duration(view.progress_seconds or 0.0)} ago")
    return ", ".join(parts)


def event_in_words(event: Mapping[str, Any]) -> str:
    """What has happened, and in which step."""
    kind = event["event"]
    reason = str(event.get("reason", ""))
    if kind == "loss_of_node":
        lost = " ".join(map(str, event.get("lost", ()))) or "nothing"
        what = f"lost {', '.join(map(str, event.get('workers', ())))} with {lost}{_pause(pause_of(event))}"
    elif kind == "reconfigured":
        what = f"{reason}{_pause(number(event.get('seconds')))}"
    elif kind == "checkpoint":
        what = f"checkpoint {event.get('action', '')} {event.get('path', reason)}".rstrip()
    elif kind in ("slow_worker", "decision"):
        what = reason
    elif kind == "fatal_restore":
        what = f"continued from {event.get('path', '?')}"
    elif kind == "restored":
        lost = ", ".join(map(str, event.get("workers", ()))) or "all workers"
        source = f" from the {event['source']}" if event.get("source") == "store" else ""
        back = f"{event.get('from_step', '?')}{source}"
        what = f"lost {lost}, went back to step {back}{_pause(number(event.get('seconds')))}"
    else:
        what = f"{kind} {reason}".rstrip()
    return f"step {event['step']}: {printable(what)}"


def ended_line(end: EndedJob) -> str:
    """How a job has ended that no longer exists."""
    where = "in" if end.state == "failed" else "after"
    step = f" {where} step {end.step}" if end.step >= 0 else ""
    ago = duration(max(0.0, time.time() - end.time_seconds))
    return f"job {end.job}: {end.state}{step}, {ago} ago{_after(end.detail)}"


def duration(seconds: float) -> str:
    """In the two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _checkpoint_line(view: JobView) -> str:
    """The last good checkpoint, and whether the next one is overdue."""
    last = view.checkpoint
    if last is None:
        return ""
    line = f"last checkpoint: step {last.step}, {duration(last.age_seconds)} ago"
    if last.overdue and last.interval_seconds is not None:
        line += f"; the next one is overdue, they are due every {duration(last.interval_seconds)}"
    return line


def _pause(seconds: float | None) -> str:
    return "" if seconds is None else f", pause {seconds:.2f} s"


def _after(detail: str) -> str:
    return f" ({detail})" if detail else ""
