"""A real job on a fleet of spot machines that come and go as in a recorded trace, many times as fast.

Each machine is an agent with its worker, and asks a metadata service of its own for notices. Which of the trace's
machines there are, who is warned, and when, is plain data (:class:`MachineEvent`), for the job as for the simulator.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.eventlog.costs import step_ends
from deepspeed_bamboo.eventlog.files import Event, merge_event_files, read_events, read_worker_files
from deepspeed_bamboo.eventlog.summary import RunSummary, differences, summarize
from deepspeed_bamboo.sim.machines import Change, MachineEvent, ordered
from deepspeed_bamboo.sim.traces import capped
from deepspeed_bamboo.sweep.forked import with_stacks
from deepspeed_bamboo.sweep.sim_validation import Happened, SleepingJob, calibrated, started, wait_for_first_step
from deepspeed_bamboo.sweep.spot_market import SpotMarket
from deepspeed_bamboo.sweep.step_record import redone_problems, step_problems, ways_back
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine

_START_SECONDS, _ENDING_SECONDS = 120.0, 120.0
_LOOK_SECONDS = 0.02


def thinned(events: Iterable[MachineEvent], *, one_in: int, capacity: int) -> tuple[MachineEvent, ...]:
    """One in so many machines, in the order in which they come, and never more than ``capacity`` at once."""
    kept: set[str] = set()
    found = []
    count = 0
    for event in events:
        if event.change is Change.ADD:
            if count % one_in == 0:
                kept.add(event.node)
            count += 1
        if event.node in kept:
            found.append(event)
    return tuple(capped(found, capacity=capacity))


def sped_up(events: Iterable[MachineEvent], *, times: float) -> tuple[MachineEvent, ...]:
    """The same in a shorter time, and in one zone, as the fleet is."""
    return tuple(replace(event, at_milliseconds=round(event.at_milliseconds / times), zone="") for event in events)


def with_notices(
    events: Sequence[MachineEvent], *, share: float, milliseconds: int, seed: int
) -> tuple[MachineEvent, ...]:
    """A ``share`` of the machines that go is warned so long before, or when it comes; who is drawn.

    A trace that has notices stays as it is.
    """
    if any(event.change is Change.NOTICE for event in events):
        return tuple(events)
    source = random.Random(seed)
    came: dict[str, int] = {}
    found = list(events)
    for event in events:
        if event.change is Change.ADD:
            came[event.node] = event.at_milliseconds
        elif event.change is Change.REMOVE and source.random() < share:
            at = max(came[event.node] + 1, event.at_milliseconds - milliseconds)
            found.append(replace(event, at_milliseconds=min(at, event.at_milliseconds), change=Change.NOTICE))
    return tuple(ordered(found))


@dataclass
class Driven:
    """What became of a job, from the end of its first step to that of its last one.

    Attributes:
        happened: its events by worker, and how long joining workers took to register.
        machines: what was done to them, and when it really was.
        instances: of the fleet, by their names in the trace.
        began: when the first step had ended (time.time()).
        steps: that were trained.
        seconds: that it took.
        dollars: that the fleet cost, by its own records.
        dollars_per_hour: of one machine.
    """

    happened: Happened = field(default_factory=Happened)
    machines: list[MachineEvent] = field(default_factory=list)
    instances: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    dollars: float = 0.0
    dollars_per_hour: float = 0.0

    @property
    def events(self) -> list[Event]:
        """Of all workers."""
        return [event for found in self.happened.files.values() for event in found]


def drive(
    job: SleepingJob,
    events: Sequence[MachineEvent],
    *,
    seconds: float,
    notice_seconds: float,
    server: ForkServer,
    folder: Path,
) -> Driven:
    """Train for so many ``seconds`` on a fleet that comes and goes by ``events``.

    Raises BambooError when the job fails.
    """
    first = [event for event in events if event.at_milliseconds == 0 and event.change is Change.ADD]
    driven = Driven(machines=[*first])
    with SpotMarket(machines=len(first)) as market:
        nodes, driven.dollars_per_hour = market.instances, market.dollars_per_hour
        notices = {node: market.notices(node) for node in nodes}
        with started(job, server=server, folder=folder, nodes=nodes, notices=notices) as machine:
            wait_for_first_step(machine, folder, deadline=time.monotonic() + _START_SECONDS)
            driven.began = began = min(step_ends(_events_in(folder)).items())[1]
            before = market.dollars_at(began)
            driven.instances = {event.node: node for event, node in zip(first, nodes, strict=True)}
            hands = _Hands(machine, market, driven, notice_seconds=notice_seconds)
            for event in events:
                if event not in first:
                    hands.wait(until=began + event.at_milliseconds / 1000.0)
                    hands.do(event)
            hands.wait(until=began + seconds)
            machine.coordinator.request_stop("the trace is over")
            _end(machine, folder)
        driven.happened.files = read_worker_files(folder / "events")
        ends = step_ends(driven.events)
        driven.steps, driven.seconds = max(ends) - min(ends), ends[max(ends)] - began
        driven.dollars = market.dollars_at(ends[max(ends)]) - before
    return driven


def detections(driven: Driven) -> list[float]:
    """Of each machine that went with work on it, how long it took until the job knew: the log can't say that."""
    heard: dict[str, float] = {}
    for event in driven.events:
        if event["event"] not in ("failover", "restored"):
            continue
        parts = event.get("pause_seconds")
        known = (
            event["t"] - event["seconds"] if parts is None else event["regrouped_t"] - parts["regroup"] - parts["abort"]
        )
        for worker in event.get("workers", ()):
            instance = str(worker).rsplit("-", 2)[0]
            heard[instance] = min(known, heard.get(instance, known))
    went = {
        driven.instances[event.node]: driven.began + event.at_milliseconds / 1000.0
        for event in driven.machines
        if event.change is Change.REMOVE
    }
    return [max(0.0, heard[instance] - moment) for instance, moment in went.items() if instance in heard]


def profiled(driven: Driven, *, path: Path) -> float:
    """Write the profile of a run, with detections as they were; returns how long joining workers took to register."""
    measured, join_seconds = calibrated(driven.happened, path=path)
    found = detections(driven)
    costs = {**measured.costs, **({"detect_seconds": fmean(found)} if found else {})}
    path.write_text(json.dumps({**measured.to_json(), "costs": costs}, indent=1) + "\n", encoding="utf-8")
    return join_seconds


def undisturbed(job: SleepingJob, *, steps: int, server: ForkServer, folder: Path) -> RunSummary:
    """The same steps with nobody lost and without sleep, which changes no number. Raises BambooError when it fails."""
    awake = replace(job, steps=steps, seconds=(0.0,) * len(job.seconds))
    nodes = [f"n{rank}" for rank in range(job.workers)]
    with started(awake, server=server, folder=folder, nodes=nodes) as machine:
        _end(machine, folder)
    return _summary(folder)


def problems_of(driven: Driven, reference: RunSummary, *, folder: Path, job: SleepingJob) -> list[str]:
    """A line for each number that is another one than in the undisturbed job, and each sample lost or trained twice."""
    result, events = _summary(folder), driven.events
    struck = {event["step"] for event in events if event["event"] == "failover"}
    struck |= {way.step for way in ways_back(events)}
    return [
        *differences(reference, result),
        *redone_problems(events, reference.losses),
        *step_problems(
            driven.happened.files,
            grid=Grid(1, len(job.seconds)),
            steps=result.final_step or 0,
            micro_batches=job.micro_batches,
            # Who was killed there did not live to log them; that nothing is missing the losses say.
            cut_short={step - behind for step in struck for behind in (0, 1)},
        ),
    ]


def _end(machine: Machine, folder: Path) -> None:
    """Wait for it, and keep what was printed. Raises BambooError when the job has failed."""
    outcome = with_stacks(machine, machine.wait(within_seconds=_ENDING_SECONDS))
    (folder / "output.txt").write_text(outcome.output, encoding="utf-8")
    if outcome.timed_out or all(outcome.exit_codes.values()):
        raise BambooError(f"the job ended with {outcome.exit_codes}:\n{outcome.output[-5000:]}")


def _events_in(folder: Path) -> list[Event]:
    return [event for found in read_worker_files(folder / "events").values() for event in found]


def _summary(folder: Path) -> RunSummary:
    return summarize(read_events(merge_event_files(folder / "events")))


class _Hands:
    """Does to fleet and machines what the trace says."""

    def __init__(self, machine: Machine, market: SpotMarket, driven: Driven, *, notice_seconds: float) -> None:
        self._machine, self._market, self._driven, self._notice_seconds = machine, market, driven, notice_seconds
        self._ranks = {instance: rank for rank, instance in enumerate(driven.instances.values())}
        self._coming: dict[str, float] = {}

    def wait(self, *, until: float) -> None:
        """Until a moment (time.time()). Raises BambooError when the job ends before."""
        while (left := until - time.time()) > 0.0:
            outcome = self._machine.wait(within_seconds=min(_LOOK_SECONDS, left))
            if not outcome.timed_out:
                raise BambooError(f"the job ended early:\n{outcome.output[-5000:]}")
            self._look()

    def do(self, event: MachineEvent) -> None:
        """Grant, warn or take a machine, and note when that was."""
        now, instances = time.time(), self._driven.instances
        if event.change is Change.ADD:
            instance = instances[event.node] = self._market.grant()
            self._ranks[instance] = self._machine.join(node=instance, notices=self._market.notices(instance))
            self._coming[instance] = now
        elif event.change is Change.NOTICE:
            self._market.notice(instances[event.node], seconds=self._notice_seconds)
        else:
            self._machine.take(self._ranks[instances[event.node]])
            self._market.take(instances[event.node])
        self._driven.machines.append(replace(event, at_milliseconds=max(1, round(1000.0 * (now - self._driven.began)))))

    def _look(self) -> None:
        """Note who has registered meanwhile."""
        if not self._coming:
            return
        there = {member.node for member in self._machine.coordinator.members().values()}
        for node in there.intersection(self._coming):
            self._driven.happened.join_seconds.append(time.time() - self._coming.pop(node))
