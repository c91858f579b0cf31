"""What there is to see of a running job: read once from its coordinator, shown as a table or as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed_bamboo.coordination import Drain, EpochRecord, JobCoordinator, Member
from deepspeed_bamboo.coordination.records import AgentRecord, EndedJob
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.standing_still import in_words

_SHOWN = 8
_OVERDUE_INTERVALS = 2.0
_LONG_SECONDS, _LONG_STEPS = 30.0, 10.0  # without a step, when a job is said to stand still: the longer of the two


@dataclass(frozen=True)
class WorkerView:
    """One worker. ``state``: active, standby, joining, leaving (its node drains), silent (its key is gone), or
    done (it is gone since the job is finished).

    Or a slot without a worker that the job knows, ``preparing``: its script imports, reads data, builds its model.
    """

    worker: WorkerId
    node: str
    zone: str
    state: str
    hosts: tuple[str, ...]
    shadows: tuple[str, ...]
    address: str = "?"
    """Where its machine is reached."""
    pid: int | None = None
    """Its process there."""
    agent_pid: int | None = None
    """That of its agent."""


@dataclass(frozen=True)
class JobView:
    """A job at one moment. Times are in seconds since then by this machine's clock; None for what isn't known.

    ``state``: starting, running, stopping, finished, failed, or dead (nobody is left to run it).
    """

    job: str
    state: str
    detail: str
    epoch: int | None
    reason: str
    age_seconds: float | None
    epoch_seconds: float | None
    agents: int
    workers: tuple[WorkerView, ...]
    draining: tuple[Drain, ...]
    progress: dict[str, Any] | None = None
    """What the job last said of itself: step, its loss and seconds, when (t), and recent events."""
    slots: int = 0
    """With how many it was started; 0 if that isn't known."""
    missing_slots: tuple[int, ...] = ()
    """While it starts: those of them that are not there, and without which it can't begin."""
    hangs: dict[WorkerId, dict[str, Any]] = field(default_factory=dict)
    """Workers that stand still: rank, node, doing, step, seconds (when that was noticed), waiting, stack."""

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("finished", "failed", "dead")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(coordinator: JobCoordinator) -> JobView:
    """Read the job's state. Raises CoordinatorUnavailable."""
    epoch, members, drains = coordinator.peek_epoch(), coordinator.members(), coordinator.draining()
    agents = coordinator.agents()
    state, detail = _state(coordinator, alive=bool(agents or members), epoch=epoch)
    started, slots = coordinator.started_seconds(), coordinator.start_slots()
    return JobView(
        job=coordinator.job,
        state=state,
        detail=detail,
        epoch=None if epoch is None else epoch.number,
        reason="" if epoch is None else epoch.reason,
        age_seconds=None if started is None else max(0.0, time.time() - started),
        epoch_seconds=None if epoch is None else max(0.0, time.time() - epoch.time_seconds),
        agents=len(agents),
        workers=(
            *_with_agents(_workers(epoch, members, set(drains), finished=state == "finished"), members, agents),
            *(_preparing(agents, members) if state in ("starting", "running") else ()),
        ),
        draining=tuple(drains.values()),
        progress=coordinator.status(),
        slots=slots,
        missing_slots=tuple(rank for rank in range(slots) if rank not in agents) if state == "starting" else (),
        hangs={worker: facts for worker, facts in coordinator.hangs().items() if worker in members},
    )


def lines(view: JobView) -> list[str]:
    """``view`` as text."""
    age = "" if view.age_seconds is None else f", started {_duration(view.age_seconds)} ago"
    found = [f"job {view.job}: {view.state}{age}, {view.agents} agents{_after(view.detail)}"]
    if view.missing_slots:
        ranks = ", ".join(map(str, view.missing_slots))
        found.append(f"waiting for {len(view.missing_slots)} of {view.slots} slots to begin: {ranks}")
    if view.epoch is not None and view.epoch_seconds is not None:
        found.append(f"epoch {view.epoch}, since {_duration(view.epoch_seconds)}: {view.reason}")
    if view.progress is not None:
        found.append(_step_line(view.progress))
        found += _checkpoint_line(view.progress)
        if view.state == "running" and _stands_still(view.progress):
            found.append("no step has ended since: a worker is busy otherwise, or stands still; see their output")
    for worker, facts in view.hangs.items():
        found += in_words(worker, facts).splitlines()
    for drain in view.draining:
        hurry = "" if drain.deadline_seconds is None else f", {drain.deadline_seconds:.0f} s from the request on"
        found.append(f"node {drain.node} is to be left{hurry}: {drain.reason}")
    if view.workers:
        found += ["", *_table([_HEADING, *map(_row, view.workers)])]
    events = (view.progress or {}).get("events", [])
    if events:
        ages = [(f"{_duration(max(0.0, time.time() - event['t']))} ago", _told(event)) for event in events]
        found += ["", *_table(ages)]
    return found


_HEADING = ("worker", "node", "zone", "state", "hosts (pipeline.stage)", "shadows", "address", "pid", "agent's")


def _row(view: WorkerView) -> tuple[str, ...]:
    processes = ("-" if pid is None else str(pid) for pid in (view.pid, view.agent_pid))
    hosts, shadows = _short(view.hosts), _short(view.shadows)
    return (view.worker, view.node, view.zone, view.state, hosts, shadows, view.address, *processes)


def ended_line(end: EndedJob) -> str:
    """A job that is there no more."""
    step = f" in step {end.step}" if end.step >= 0 else ""
    ago = _duration(max(0.0, time.time() - end.time_seconds))
    return f"job {end.job}: {end.state}{step}, {ago} ago{_after(end.detail)}"


def _checkpoint_line(progress: dict[str, Any]) -> list[str]:
    """The last good checkpoint, and whether the next one is overdue."""
    saved = [event for event in progress.get("events", []) if event["event"] == "checkpoint"]
    saved = [event for event in saved if event.get("action") == "saved"]
    if not saved:
        return []
    newest = saved[-1]
    age = max(0.0, time.time() - newest["t"])
    line = f"last checkpoint: step {newest.get('last_step', newest['step'])}, {_duration(age)} ago"
    interval = newest.get("interval_seconds")
    if isinstance(interval, int | float) and age > _OVERDUE_INTERVALS * interval:
        line += f"; the next one is overdue, they are due every {_duration(interval)}"
    return [line]


def _step_line(progress: dict[str, Any]) -> str:
    """Where the job is."""
    parts = [f"step {progress['step']}"]
    if isinstance(progress.get("loss"), float):
        parts.append(f"loss {progress['loss']:.4f}")
    if "seconds" in progress:
        parts.append(f"{progress['seconds']:.3g} s a step")
    parts.append(f"{_duration(max(0.0, time.time() - progress['t']))} ago")
    return ", ".join(parts)


def _stands_still(progress: dict[str, Any]) -> bool:
    """Whether the newest step is much older than steps take. Scripts may evaluate and save in between."""
    age = time.time() - progress["t"]
    return bool(age > max(_LONG_SECONDS, _LONG_STEPS * progress.get("seconds", 0.0)))


def _told(event: dict[str, Any]) -> str:
    """An event in words."""
    if event["event"] == "loss_of_node":
        pause = event["pause_seconds"]["total"]
        what = f"lost {', '.join(event['workers'])} with {' '.join(event['lost']) or 'nothing'}, pause {pause:.2f} s"
    elif event["event"] == "reconfigured":
        what = f"{event['reason']}, pause {event['seconds']:.2f} s"
    elif event["event"] == "mode":
        what = f"mode {event['reason']}"
    elif event["event"] == "checkpoint":
        what = f"checkpoint {event['action']} {event.get('path', event.get('reason', ''))}".rstrip()
    elif event["event"] == "fatal_restore":
        what = f"went on from {event['path']}"
    else:
        what = f"{event['event']} {event.get('reason', '')}".rstrip()
    return f"step {event['step']}: {what}"


def _state(coordinator: JobCoordinator, *, alive: bool, epoch: EpochRecord | None) -> tuple[str, str]:
    failure, stop = coordinator.failure(), coordinator.stop_requested()
    if failure is not None:
        return "failed", failure.message
    if coordinator.finished() is not None:
        return "finished", ""
    if not alive:
        return "dead", "it has ended" if epoch is None else "nobody runs it any more"
    if stop is not None:
        return "stopping", stop
    return ("starting", "") if epoch is None else ("running", "")


def _workers(
    epoch: EpochRecord | None, members: dict[WorkerId, Member], drains: set[str], *, finished: bool
) -> Iterator[WorkerView]:
    """Those of the epoch first, in its order."""
    taking_part = () if epoch is None else epoch.members
    for worker in (*taking_part, *(worker for worker in members if worker not in taking_part)):
        member = members.get(worker)
        owned = () if epoch is None else tuple(str(c) for c, owner in epoch.placement.owners if owner == worker)
        shadows = () if epoch is None else tuple(str(c) for c, host in epoch.placement.shadows if host == worker)
        if member is None:
            state = "done" if finished else "silent"
        elif member.node in drains:
            state = "leaving"
        elif worker not in taking_part:
            state = "joining" if member.joining else "starting"
        else:
            state = "active" if owned or shadows else "standby"
        if member is None:
            yield WorkerView(worker, "?", "?", state, owned, shadows)
        else:
            yield WorkerView(worker, member.node, member.zone, state, owned, shadows, member.address, member.pid)


def _with_agents(
    workers: Iterator[WorkerView], members: Mapping[WorkerId, Member], agents: Mapping[int, AgentRecord]
) -> Iterator[WorkerView]:
    """``workers``, and the agent beside each."""
    for view in workers:
        member = members.get(view.worker)
        agent = None if member is None else agents.get(member.rank)
        yield view if agent is None else replace(view, agent_pid=agent.pid)


def _preparing(agents: Mapping[int, AgentRecord], members: Mapping[WorkerId, Member]) -> Iterator[WorkerView]:
    """The slots whose worker has not come to the job yet, or not again."""
    there = {member.rank for member in members.values()}
    for rank, agent in sorted(agents.items()):
        if rank not in there:
            yield WorkerView(f"(slot {rank})", agent.node, "?", "preparing", (), (), agent_pid=agent.pid)


def _short(coordinates: Sequence[str]) -> str:
    more = f" and {len(coordinates) - _SHOWN} more" if len(coordinates) > _SHOWN else ""
    return " ".join(coordinates[:_SHOWN]) + more if coordinates else "-"


def _after(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _duration(seconds: float) -> str:
    """In the two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
