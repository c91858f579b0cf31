"""The screen of ``ds_bamboo status``: a job's state and a width go in, lines of that width come out.

The grid names workers by their numbers in the table below it, so that it fits where their names would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed_bamboo.cli.job_view import JobView, WorkerView
from deepspeed_bamboo.cli.status_words import duration, event_in_words, facts, heading, step_line
from deepspeed_bamboo.cli.text_layout import Column, beside, cut, printable, table, wrapped
from deepspeed_bamboo.core.placement import WorkerId

LEAST_CELLS = 20
_EVENTS_CELLS = 50  # where so much room is left beside the grid, events are there
_SHOWN = 8
_LEAST_WORKERS = 3
_USUAL = ("active", "standby", "done")
_MARKS = {"?": "silent", "!": "stands still", "~": "slow"}


def screen(view: JobView, *, cells: int | None = None, rows: int | None = None) -> list[str]:
    """``view`` in lines of at most ``cells`` cells, and at most ``rows`` of them. None: no limit.

    Where there are more workers than rows, those in an unusual state are shown first.
    """
    cells = None if cells is None else max(LEAST_CELLS, cells)
    top = [line for text in (heading(view), *facts(view)) for line in wrapped(printable(text).rstrip(), cells)]
    grid, events = _grid(view, cells), _events(view, cells)
    side = beside(grid, events, cells, least=_EVENTS_CELLS) if cells is not None and grid and events else None
    middle, end = (side, []) if side is not None else (grid, events)
    used = sum(len(block) + 1 for block in (top, middle, end) if block)
    workers = _workers(view, cells, rows=None if rows is None else max(_LEAST_WORKERS, rows - used - 1))
    found = [line for block in (top, middle, workers, end) if block for line in (*block, "")][:-1]
    if rows is None or len(found) <= rows:
        return found
    shown = max(0, rows - 1)
    return [*found[:shown], cut(f"… {len(found) - shown} more lines", cells or LEAST_CELLS)]


def news(before: JobView | None, now: JobView) -> list[str]:
    """What is new in ``now``, in lines for a log; all of it where nothing was shown before."""
    if before is None:
        return screen(now)
    found = []
    if _about_the_job(before) != _about_the_job(now):
        found += [heading(now), *facts(now)]
    elif now.progress is not None and now.progress.get("step") != (before.progress or {}).get("step"):
        found.append(step_line(now))
    known = {(event["t"], event["event"]) for event in before.events}
    found += [event_in_words(event) for event in now.events if (event["t"], event["event"]) not in known]
    return [printable(line).rstrip() for line in found]


def _about_the_job(view: JobView) -> tuple[object, ...]:
    """What is worth more than a line when it changes."""
    overdue = view.checkpoint is not None and view.checkpoint.overdue
    told = (view.missing_slots, view.hangs, view.slow, view.draining, view.stands_still, overdue)
    return view.state, view.detail, view.epoch, *told


# -- the grid ------------------------------------------------------------------------------------------


def _grid(view: JobView, cells: int | None) -> list[str]:
    """Who hosts each coordinate, and who has its shadow: a row for each pipeline."""
    if view.grid is None:
        return []
    pipelines, stages = view.grid
    marks = _marks(view)
    texts = {worker: f"{number}{marks.get(worker, '')}" for worker, number in _numbers(view).items()}
    hosts = {c: texts[worker.worker] for worker in view.workers for c in worker.hosts}
    shadows: dict[str, str] = {}
    for worker in view.workers:
        for c in worker.shadows:
            shadows[c] = f"{shadows[c]}+{texts[worker.worker]}" if c in shadows else texts[worker.worker]
    rows = [[f"{pipeline}.{stage}" for stage in range(stages)] for pipeline in range(pipelines)]
    rows = [[f"{hosts.get(c, '-')}/{shadows.get(c, '-')}" for c in row] for row in rows]
    label = f"pipeline {pipelines - 1}"
    widest = max(len(text) for row in rows for text in (*row, str(stages - 1)))
    at_once = stages if cells is None else max(1, (cells - len(label)) // (widest + 2))
    found = []
    for first in range(0, stages, at_once):
        shown = range(first, min(stages, first + at_once))
        columns = [Column("stage", tuple(f"pipeline {pipeline}" for pipeline in range(pipelines)))]
        columns += [Column(str(stage), tuple(row[stage].ljust(widest) for row in rows)) for stage in shown]
        found += table(columns, cells)
    used = "".join(f", {mark} {_MARKS[mark]}" for mark in _MARKS if mark in marks.values())
    two = ", 2+3: both have one" if any("+" in text for text in shadows.values()) else ""
    return [*found, *wrapped(f"1/2: worker 1 hosts it, 2 has its shadow{two}{used}", cells)]


def _numbers(view: JobView) -> dict[WorkerId, int]:
    """From 1 on, for the workers that are there; slots whose worker is not have none."""
    there = [worker.worker for worker in view.workers if worker.state != "preparing"]
    return {worker: number for number, worker in enumerate(there, start=1)}


def _marks(view: JobView) -> Mapping[WorkerId, str]:
    """What is wrong with workers, the worst of it."""
    silent = [worker.worker for worker in view.workers if worker.state == "silent"]
    return {**dict.fromkeys(view.slow, "~"), **dict.fromkeys(view.hangs, "!"), **dict.fromkeys(silent, "?")}


# -- workers and events --------------------------------------------------------------------------------


def _workers(view: JobView, cells: int | None, *, rows: int | None) -> list[str]:
    """A line for each; at most ``rows`` with the heading."""
    if not view.workers:
        return []
    room = len(view.workers) if rows is None or len(view.workers) < rows else rows - 2
    by_need = sorted(view.workers, key=lambda worker: worker.state in _USUAL)
    chosen = set(map(id, by_need[:room]))
    shown = [worker for worker in view.workers if id(worker) in chosen]
    hidden = len(view.workers) - len(shown)
    more = [cut(f"and {hidden} more workers", cells or LEAST_CELLS)] if hidden else []
    return [*table(_columns(shown, numbers=_numbers(view)), cells), *more]


def _columns(workers: Sequence[WorkerView], *, numbers: Mapping[WorkerId, int]) -> list[Column]:
    def column(title: str, texts: Sequence[str], *, gives_way: int = 0, repeats: bool = False) -> Column:
        whole = title in ("#", "state", "pid", "agent's")
        return Column(title, tuple(map(printable, texts)), gives_way, repeats=repeats, whole=whole)

    return [
        column("#", [str(numbers.get(worker.worker, "-")) for worker in workers]),
        column("worker", [worker.worker for worker in workers], gives_way=1),
        column("node", [worker.node for worker in workers], gives_way=2),
        column("zone", [worker.zone for worker in workers], gives_way=4),
        column("state", [worker.state for worker in workers]),
        column("hosts (pipeline.stage)", [_short(worker.hosts) for worker in workers], gives_way=7, repeats=True),
        column("shadows", [_short(worker.shadows) for worker in workers], gives_way=8, repeats=True),
        column("address", [worker.address for worker in workers], gives_way=6, repeats=True),
        column("pid", [_pid(worker.pid) for worker in workers], gives_way=3),
        column("agent's", [_pid(worker.agent_pid) for worker in workers], gives_way=5),
    ]


def _pid(pid: int | None) -> str:
    return "-" if pid is None else str(pid)


def _short(coordinates: Sequence[str]) -> str:
    more = f" and {len(coordinates) - _SHOWN} more" if len(coordinates) > _SHOWN else ""
    return " ".join(coordinates[:_SHOWN]) + more if coordinates else "-"


def _events(view: JobView, cells: int | None) -> list[str]:
    """What has happened lately, oldest first."""
    ages = tuple(f"{duration(max(0.0, view.seen_t - event['t']))} ago" for event in view.events)
    texts = tuple(map(event_in_words, view.events))
    return table([Column("", ages, gives_way=1, whole=True), Column("", texts, prose=True)], cells) if texts else []
