"""The visible state of a running job, read once from its coordinator. ``status_screen.py`` shows it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed_bamboo.coordination import Drain, EpochRecord, JobCoordinator, Member
from deepspeed_bamboo.coordination.job_news import last_step
from deepspeed_bamboo.coordination.records import AgentRecord, JobFailure
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.long_work import WorkFacts

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
    """The address of its machine."""
    pid: int | None = None
    """Its process on that machine."""
    agent_pid: int | None = None
    """Its agent's process."""


@dataclass(frozen=True)
class Failover:
    """A loss that the job has survived: in which step, who was lost with which coordinates, how long others waited."""

    step: int
    workers: tuple[WorkerId, ...]
    lost: tuple[str, ...]
    pause_seconds: float | None
    age_seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """The last good checkpoint. ``interval_seconds``: how often one is due, if that is known."""

    step: int
    path: str
    age_seconds: float
    interval_seconds: float | None

    @property
    def overdue(self) -> bool:
        """Whether the next one should be there by now."""
        return self.interval_seconds is not None and self.age_seconds > _OVERDUE_INTERVALS * self.interval_seconds


@dataclass(frozen=True)
class JobView:
    """A job at one moment. Ages are in seconds by this machine's clock; None for what isn't known.

    ``state``: starting, running, waiting (for machines, since nobody is left who can train), stopping, finished,
    failed, or dead (nobody runs it any more).
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
    grid: tuple[int, int] | None = None
    """Pipelines and stages."""
    progress: dict[str, Any] | None = None
    """The job's latest report: step, its loss and seconds, mode, slow workers, when (t), and recent events."""
    progress_seconds: float | None = None
    """How old that report is."""
    seen_t: float = 0.0
    """When this was read: the wall clock, as ``t`` of events is."""
    failovers: tuple[Failover, ...] = ()
    """The last ones, oldest first."""
    checkpoint: Checkpoint | None = None
    slots: int = 0
    """How many slots it was started with; 0 if that isn't known."""
    missing_slots: tuple[int, ...] = ()
    """While it starts: the slots that are missing, and that it needs to start."""
    works: dict[WorkerId, WorkFacts] = field(default_factory=dict)
    """Long work that runs at this moment: what, how much is done, of how much, in which unit, for how many seconds."""
    hangs: dict[WorkerId, dict[str, Any]] = field(default_factory=dict)
    """Workers that stand still: rank, node, doing, step, seconds (when that was noticed), waiting, stack."""
    failure: str = ""
    """The kind of its failure, if it failed."""
    slots_of: dict[str, int] = field(default_factory=dict)
    """Its nodes, those without a worker included, and how many slots each has: agents that run there."""

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("finished", "failed", "dead")

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """What has happened lately, oldest first."""
        return tuple((self.progress or {}).get("events", ()))

    @property
    def mode(self) -> str | None:
        """The mode of redundancy of the newest step."""
        mode = (self.progress or {}).get("mode")
        return mode if isinstance(mode, str) else None

    @property
    def slow(self) -> dict[WorkerId, float]:
        """The speeds of slow workers; 1 is as fast as before."""
        told = (self.progress or {}).get("slow")
        found = {str(w): number(s) for w, s in told.items()} if isinstance(told, dict) else {}
        return {worker: speed for worker, speed in found.items() if speed is not None and speed > 0.0}

    @property
    def stands_still(self) -> bool:
        """Whether the newest step is much older than steps take. Scripts may evaluate and save in between."""
        if self.state != "running" or self.progress is None or self.progress_seconds is None:
            return False
        usual = number(self.progress.get("seconds")) or 0.0
        return self.progress_seconds > max(_LONG_SECONDS, _LONG_STEPS * usual)

    def to_json(self) -> dict[str, Any]:
        """All of it, as a value that ``json`` can write: None for a number that is none, such as a loss that is nan."""
        found = asdict(self)
        if self.checkpoint is not None:
            found["checkpoint"]["overdue"] = self.checkpoint.overdue
        whole = {**found, "mode": self.mode, "slow": self.slow, "stands_still": self.stands_still}
        return {name: _finite(value) for name, value in whole.items()}


def _finite(value: Any) -> Any:
    """``value`` with None in the place of each number that JSON has no text for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return tuple(map(_finite, value)) if isinstance(value, list | tuple) else value


def look(coordinator: JobCoordinator) -> JobView:
    """Read the job's state. Raises CoordinatorUnavailable."""
    epoch, members, drains = coordinator.peek_epoch(), coordinator.members(), coordinator.draining()
    agents = coordinator.agents()
    failure = coordinator.failure()
    state, detail = _state(coordinator, alive=bool(agents or members), epoch=epoch, failure=failure)
    started, slots = coordinator.started_seconds(), coordinator.start_slots()
    progress, now = _progress(coordinator), time.time()
    events = () if progress is None else tuple(progress.get("events", ()))
    return JobView(
        job=coordinator.job,
        state=state,
        detail=detail,
        epoch=None if epoch is None else epoch.number,
        reason="" if epoch is None else epoch.reason,
        age_seconds=None if started is None else max(0.0, now - started),
        epoch_seconds=None if epoch is None else max(0.0, now - epoch.time_seconds),
        agents=len(agents),
        workers=(
            *_with_agents(_workers(epoch, members, set(drains), finished=state == "finished"), members, agents),
            *(_preparing(agents, members) if state in ("starting", "running") else ()),
        ),
        draining=tuple(drains.values()),
        grid=None if epoch is None else (epoch.placement.grid.pipelines, epoch.placement.grid.stages),
        progress=progress,
        progress_seconds=None if progress is None else max(0.0, now - progress["t"]),
        seen_t=now,
        failovers=failovers(events, now=now),
        checkpoint=last_checkpoint(events, now=now),
        slots=slots,
        missing_slots=tuple(sorted({*range(slots)} - {*agents})) if epoch is None and state == "starting" else (),
        works={
            worker: WorkFacts.from_json(facts) for worker, facts in coordinator.works().items() if worker in members
        },
        hangs={worker: facts for worker, facts in coordinator.hangs().items() if worker in members},
        failure="" if failure is None else failure.kind,
        slots_of=_slots_of(agents, members),
    )


def _slots_of(agents: Mapping[int, AgentRecord], members: Mapping[WorkerId, Member]) -> dict[str, int]:
    """By node. A worker's agent may be away for a moment."""
    found = Counter(agent.node for agent in agents.values())
    return {**{member.node: 1 for member in members.values()}, **found}


def failovers(events: Sequence[Mapping[str, Any]], *, now: float) -> tuple[Failover, ...]:
    """The losses among ``events``."""
    return tuple(
        Failover(
            step=event["step"],
            workers=_texts(event.get("workers")),
            lost=_texts(event.get("lost")),
            pause_seconds=pause_of(event),
            age_seconds=max(0.0, now - event["t"]),
        )
        for event in events
        if event["event"] == "loss_of_node"
    )


def last_checkpoint(events: Sequence[Mapping[str, Any]], *, now: float) -> Checkpoint | None:
    """The newest good checkpoint that ``events`` tell of."""
    saved = [event for event in events if event["event"] == "checkpoint" and event.get("action") == "saved"]
    if not saved:
        return None
    newest = saved[-1]
    return Checkpoint(
        step=newest.get("last_step", newest["step"]),
        path=str(newest.get("path", "")),
        age_seconds=max(0.0, now - newest["t"]),
        interval_seconds=number(newest.get("interval_seconds")),
    )


def pause_of(event: Mapping[str, Any]) -> float | None:
    """How long the survivors of a loss waited, in seconds, if ``event`` tells that."""
    parts = event.get("pause_seconds")
    return number(parts.get("total")) if isinstance(parts, dict) else None


def number(value: object) -> float | None:
    """``value`` where it is a number. What is in etcd may have been written by anybody."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _progress(coordinator: JobCoordinator) -> dict[str, Any] | None:
    """The latest report; of a job that is complete with its last step, of which there may have been no report."""
    told, finished = coordinator.status(), coordinator.finished()
    if told is None or finished is None or (step := last_step(finished, told)) <= told["step"]:
        return told
    return {**{name: value for name, value in told.items() if name != "loss"}, "step": step}


def _state(
    coordinator: JobCoordinator, *, alive: bool, epoch: EpochRecord | None, failure: JobFailure | None
) -> tuple[str, str]:
    stop = coordinator.stop_requested()
    if failure is not None:
        return "failed", failure.message
    if coordinator.finished() is not None:
        return "finished", "" if stop is None else f"stopped: {stop}"
    if not alive:
        return "dead", "it has ended" if epoch is None else "nobody runs it any more"
    if stop is not None:
        return "stopping", stop
    if epoch is None:
        return "starting", ""
    return ("running", "") if epoch.trains else _idle(epoch)


def _idle(epoch: EpochRecord) -> tuple[str, str]:
    """State and detail of a job in which nobody trains."""
    if epoch.roster is not None:
        return "starting", f"anew, with {len(epoch.roster.slots)} workers, from the newest checkpoint"
    return "waiting", (
        f"nobody is left who can train: {epoch.reason}; it waits {epoch.waits_seconds:g} s for a machine or a replaced "
        "worker, to start anew from the newest checkpoint"
    )


def _workers(
    epoch: EpochRecord | None, members: dict[WorkerId, Member], drains: set[str], *, finished: bool
) -> Iterator[WorkerView]:
    """Those of the epoch first, in its order."""
    taking_part = () if epoch is None else epoch.members
    for worker in (*taking_part, *(worker for worker in members if worker not in taking_part)):
        member = members.get(worker)
        owned = () if epoch is None else tuple(str(c) for c, owner in epoch.placement.owners if owner == worker)
        shadows = () if epoch is None else tuple(str(c) for c, host in epoch.placement.all_shadows if host == worker)
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
