"""A real job of layers that sleep, to whose machines things happen by the clock, next to what the simulator predicts.

The job runs first with a few losses and joins, whose log gives the profile (``eventlog/costs.py``). Then seeded traces
happen to it, and the simulator predicts each from that profile and the trace alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.eventlog.costs import MeasuredJob, measured_job, move_seconds, moves_of, step_ends
from deepspeed_bamboo.eventlog.files import Event, read_worker_files
from deepspeed_bamboo.sim.build import build_policy
from deepspeed_bamboo.sim.clock import MILLISECONDS_PER_HOUR
from deepspeed_bamboo.sim.engine import RunLimits, simulate
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.ledger import Ledger
from deepspeed_bamboo.sim.machines import Change, MachineEvent, ordered
from deepspeed_bamboo.sim.measured import with_measurements
from deepspeed_bamboo.sim.policies.planned import PlannedPolicy
from deepspeed_bamboo.sim.scenario import load_preset, validated
from deepspeed_bamboo.sweep.forked import train_worker, with_stacks
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine

_LOOK_SECONDS = 0.01
_HOURS = 1.0


@dataclass(frozen=True)
class SleepingJob:
    """What is trained. ``seconds``: of each stage's forward; a backward takes twice as long.

    ``bamboo``: the section of that name. ``optimizer``: DeepSpeed's section. ``lease_seconds``: long, since
    workers share two cores and may be silent for a while.
    """

    script: Path
    seconds: tuple[float, ...]
    workers: int
    micro_batches: int
    steps: int
    limit_seconds: float
    bamboo: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"type": "SGD", "params": {"lr": 0.1}})
    lease_seconds: float = 6.0

    def settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_print": 1000000,
            "gradient_clipping": 0.0,
            "optimizer": dict(self.optimizer),
            "bamboo": dict(self.bamboo),
        }


@dataclass(frozen=True)
class Incident:
    """At ``seconds`` since the first step's end somebody is killed, joins, or is drained."""

    seconds: float
    what: str


@dataclass
class Happened:
    """What became of a job: when each incident really was, to which node, and its events."""

    incidents: list[tuple[float, str, str]] = field(default_factory=list)
    files: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    join_seconds: list[float] = field(default_factory=list)


def drawn(seed: int, *, workers: int, count: int, first_seconds: float, every_seconds: float) -> tuple[Incident, ...]:
    """Incidents, about ``every_seconds`` apart, with half of the workers left at least, and one more at most."""
    source = random.Random(seed)
    alive, at, found = workers, first_seconds, []
    for _ in range(count):
        possible = ["kill", "drain"] if alive > workers else ["join"] if alive <= max(2, workers // 2) else None
        what = source.choice(possible or ["kill", "kill", "join", "join", "drain"])
        alive += 1 if what == "join" else -1
        found.append(Incident(at, what))
        at += every_seconds * source.uniform(0.7, 1.3)
    return tuple(found)


def run_job(job: SleepingJob, incidents: Sequence[Incident], *, server: ForkServer, folder: Path) -> Happened:
    """Train while the incidents happen. Raises BambooError when the job fails."""
    nodes = [f"n{rank}" for rank in range(job.workers)]
    happened = Happened()
    with started(job, server=server, folder=folder, nodes=nodes) as machine:
        deadline = time.monotonic() + job.limit_seconds
        wait_for_first_step(machine, folder, deadline=deadline)
        began = time.time()
        hands = _Hands(machine, nodes, began=began, happened=happened)
        for incident in incidents:
            while time.time() < began + incident.seconds and machine.wait(within_seconds=_LOOK_SECONDS).timed_out:
                hands.look()
            if not machine.wait(within_seconds=0.0).timed_out:
                break  # The job is complete.
            hands.do(incident)
        outcome = machine.wait(within_seconds=max(1.0, deadline - time.monotonic()))
        outcome = with_stacks(machine, outcome)
        if outcome.timed_out or all(outcome.exit_codes.values()):
            raise BambooError(f"the job ended with {outcome.exit_codes}:\n{outcome.output[-3000:]}")
    happened.files = read_worker_files(folder / "events")
    return happened


def started(
    job: SleepingJob,
    *,
    server: ForkServer,
    folder: Path,
    nodes: Sequence[str],
    notices: Mapping[str, Mapping[str, Any]] | None = None,
) -> Machine:
    """The job, just started, with a worker on each of ``nodes``; events go to ``folder / "events"``."""
    folder.mkdir(parents=True)
    (folder / "deepspeed.json").write_text(json.dumps(job.settings()), encoding="utf-8")
    argv = [str(job.script), "--deepspeed_config", str(folder / "deepspeed.json"), "--steps", str(job.steps)]
    argv += ["--event-log", str(folder / "events"), "--seconds", *map(str, job.seconds)]
    return Machine(
        server,
        train_worker,
        workers=len(nodes),
        argv=argv,
        nodes=nodes,
        lease_seconds=job.lease_seconds,
        notices=notices,
    )


def wait_for_first_step(machine: Machine, folder: Path, *, deadline: float) -> None:
    """Until it has ended. Raises BambooError when the job ends before, or at ``deadline`` (monotonic)."""
    while not _ends(folder):
        if time.monotonic() > deadline or not machine.wait(within_seconds=_LOOK_SECONDS).timed_out:
            raise BambooError(f"the job ended before its first step:\n{machine.output(0)[-3000:]}")


def _ends(folder: Path) -> dict[int, float]:
    return step_ends(event for events in read_worker_files(folder / "events").values() for event in events)


class _Hands:
    """Lets incidents happen, to the newest or oldest machine that is there."""

    def __init__(self, machine: Machine, nodes: Sequence[str], *, began: float, happened: Happened) -> None:
        self._machine, self._began, self._happened = machine, began, happened
        self._ranks = {node: rank for rank, node in enumerate(nodes)}
        self._coming: dict[str, float] = {}
        self._source = random.Random(1)

    def look(self) -> None:
        """Note who has registered meanwhile."""
        for node, at in list(self._coming.items()):
            if any(member.node == node for member in self._machine.coordinator.members().values()):
                self._happened.join_seconds.append(time.time() - at)
                del self._coming[node]

    def do(self, incident: Incident) -> None:
        now = time.time()
        if incident.what == "join":
            node = f"late{len(self._happened.incidents)}"
            self._ranks[node] = self._machine.join(node=node)
            self._coming[node] = now
        else:
            record = self._machine.coordinator.epoch()
            members = self._machine.coordinator.members()
            # Not the first one, which decides for all: its loss is no dearer, but prints move with it.
            hosting = [worker for worker in (record.placement.workers if record else ()) if worker in members][1:]
            chosen = members[self._source.choice(hosting)]
            node = chosen.node
            if incident.what == "kill":
                self._machine.kill_worker(self._ranks[node])
            else:
                self._machine.coordinator.request_drain(node, deadline_seconds=60.0, reason="validation")
        self._happened.incidents.append((now - self._began, incident.what, node))


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted. Seconds, and steps a second; a mean of nothing is None."""

    steps_per_second: tuple[float, float]
    means: Mapping[str, tuple[float | None, float | None]]

    @property
    def throughput_error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.steps_per_second[1] / self.steps_per_second[0] - 1.0

    def error(self, name: str) -> float | None:
        """Of a mean; None where one of both is missing."""
        measured, predicted = self.means[name]
        return None if not measured or predicted is None else predicted / measured - 1.0


def compare(job: SleepingJob, happened: Happened, profile: Path, *, join_seconds: float) -> Comparison:
    """One run next to its prediction from ``profile`` and the incidents alone."""
    events = [event for its in happened.files.values() for event in its]
    ends = step_ends(events)
    first, last = min(ends), max(ends)
    record: list[tuple[str, float]] = []
    changes = {"kill": Change.REMOVE, "join": Change.ADD, "drain": Change.NOTICE}
    machines = [MachineEvent(0, Change.ADD, f"n{rank}") for rank in range(job.workers)]
    machines += [MachineEvent(round(1000.0 * at), changes[what], node) for at, what, node in happened.incidents]
    seconds = predicted(
        machines, profile, join_seconds=join_seconds, steps=last - first, capacity=10 * job.workers, record=record
    ).seconds
    measured = _measured(events)
    names = ("pause", "join", "transfer")
    said = {name: [taken for what, taken in record if what == name] for name in names}
    return Comparison(
        ((last - first) / (ends[last] - ends[first]), (last - first) / seconds),
        {
            name: (mean(measured[name]) if measured[name] else None, mean(said[name]) if said[name] else None)
            for name in names
        },
    )


def _measured(events: Sequence[Event]) -> dict[str, list[float]]:
    """Of losses the pause of who took over, of joins how long survivors waited, of all moves the longest transfer."""
    pauses: dict[int, float] = {}
    moves = moves_of(events)
    for event in events:
        if event["event"] == "failover" and event.get("taken_over"):
            parts = event["pause_seconds"]
            began = event["regrouped_t"] - parts["regroup"] - parts["abort"] - parts["detect"]
            first = event.get("first_recomputed_t") or event["regrouped_t"]
            pauses[event["epoch"]] = max(first - began, pauses.get(event["epoch"], 0.0))
    return {
        "pause": list(pauses.values()),
        "join": [move_seconds(its)[0] for its in moves if its[0]["joining"]],
        "transfer": [move_seconds(its)[1] for its in moves],
    }


@dataclass(frozen=True)
class Prediction:
    """From the first step's end to the last one's: how long, and what the machines cost."""

    seconds: float
    dollars: float


def predicted(
    machines: Sequence[MachineEvent],
    profile: Path,
    *,
    join_seconds: float,
    steps: int,
    capacity: int,
    live: Mapping[str, Any] | None = None,
    dollars_per_hour: float = 1.0,
    record: list[tuple[str, float]] | None = None,
) -> Prediction:
    """What the simulator says of so many steps.

    Args:
        machines: when which of them come, are warned and go, in milliseconds since the first step's end; those at 0 are
            there from the beginning.
        profile: as `ds_bamboo profile` writes it.
        join_seconds: from a machine's coming to its registration.
        capacity: no fewer than there ever are at once.
        live: what the simulated policy has besides what the profile says.
        dollars_per_hour: of a machine.
        record: see PlannedPolicy.
    """
    data = with_measurements(load_preset("bert"), profile).model_dump(exclude_none=True)
    data["model"] |= {"steps": steps, "parameters": 1}
    data["market"] |= {"capacity": capacity, "boot_seconds": 0.0, "dollars_per_hour": dollars_per_hour}
    data["run"] = {"duration_hours": None, "limit_hours": _HOURS}
    start = {"join_seconds": join_seconds, "start_seconds": 0.0}
    data["policies"] = {"live": {**data["policies"]["live"], **(live or {}), **start}}
    made = build_job(validated(data, where="validation"))
    # Who is there from the beginning has registered when the first step begins.
    offset, there = round(join_seconds * 1000.0), sum(event.at_milliseconds == 0 for event in machines)
    events = [
        replace(event, at_milliseconds=event.at_milliseconds + offset if event.at_milliseconds else 0)
        for event in machines
    ]
    ledger = Ledger(made.prices)
    policy = build_policy(made, ledger, policy="deepspeed-bamboo", seed=1)
    if not isinstance(policy, PlannedPolicy):
        raise BambooError("the simulator does not plan this job")
    policy.record = record
    simulate(policy, iter(ordered(events)), limits=RunLimits(made.end_milliseconds, 0))
    progress = policy.progress
    if not progress.finished:
        raise BambooError("the simulated job did not finish")
    began = progress.first_start or 0
    before = there * dollars_per_hour * began / MILLISECONDS_PER_HOUR
    return Prediction((progress.last_step_at - began) / 1000.0, progress.last_step_dollars - before)


def calibrated(happened: Happened, *, path: Path) -> tuple[MeasuredJob, float]:
    """The profile of a run, written to ``path``, and how long joining workers took to register."""
    found = measured_job(happened.files)
    path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return found, median(happened.join_seconds) if happened.join_seconds else 0.0
