"""A real job of layers that sleep, from which machines are taken in bulk by the clock: how much of its time is useful.

Time is useful in which steps are trained that count, at the pace of the workers that there are. The rest is what losses
and joins cost: noticing, going back, steps done again, moves.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.eventlog.costs import QUIET_STEPS, is_near, step_ends
from deepspeed_bamboo.eventlog.files import Event, merge_event_files, read_events, read_worker_files
from deepspeed_bamboo.eventlog.summary import RunSummary, summarize
from deepspeed_bamboo.sweep.forked import train_worker, with_stacks
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine

_LOOK_SECONDS = 0.05
_HAPPENINGS = ("fault", "failover", "restored", "reconfigured", "joined", "protected")
_ENDING_SECONDS = 120.0


@dataclass(frozen=True)
class BulkLoss:
    """At ``seconds`` since the first step so many ``workers`` are killed at once."""

    seconds: float
    workers: int


@dataclass(frozen=True)
class BulkJob:
    """What is trained. ``seconds``: of each stage's forward; a backward takes twice as long.

    ``return_seconds``: after which as many workers come in the place of those lost. ``checkpoint`` and ``redundancy``
    are those sections of "bamboo".
    """

    script: Path
    seconds: tuple[float, ...]
    workers: int
    micro_batches: int
    return_seconds: float
    checkpoint: Mapping[str, Any]
    redundancy: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        bamboo = {"checkpoint": dict(self.checkpoint), "redundancy": dict(self.redundancy)}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_print": 1000000,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
            "bamboo": {**bamboo, "topology": {"max_restarts": 0}},
        }


@dataclass(frozen=True)
class TimeSpent:
    """Of a job, from the end of its first steps to its end.

    Attributes:
        seconds: all of it.
        lost_seconds: by which steps near a loss, a way back or a move took longer than others with the same workers.
        steps: that count.
        step_seconds: of a quiet step with as many workers as ever; None where there was none.
    """

    seconds: float
    lost_seconds: float
    steps: int
    step_seconds: float | None

    @property
    def useful_share(self) -> float:
        """The share of time in which steps were trained that count."""
        return 1.0 - self.lost_seconds / self.seconds if self.seconds else 0.0

    @property
    def samples_share(self) -> float:
        """Samples of those that all workers would have trained in that time, had nobody been lost."""
        return self.steps * (self.step_seconds or 0.0) / self.seconds if self.seconds else 0.0


def drawn(seed: int, *, workers: int, minutes: float, every_minutes: float) -> tuple[BulkLoss, ...]:
    """In each interval one loss of two to all but one, between a tenth and nine tenths of it."""
    source = random.Random(seed)
    return tuple(
        BulkLoss(60.0 * every_minutes * (number + source.uniform(0.1, 0.9)), source.randint(2, workers - 1))
        for number in range(int(minutes / every_minutes))
    )


def time_spent(events: Iterable[Event]) -> TimeSpent:
    """From the events of all workers; see the module."""
    everything = list(events)
    ends = step_ends(everything)
    hosting: dict[int, set[tuple[str, str]]] = {}
    for event in everything:
        if event["event"] == "step":
            hosting.setdefault(event["step"], set()).update((c, str(event["worker"])) for c in event.get("hosted", ()))
    struck = {event["step"] for event in everything if event["event"] in _HAPPENINGS}
    taken = {step: end - ends[step - 1] for step, end in ends.items() if step - 1 in ends and step > QUIET_STEPS}
    near = {step for step in taken if is_near(step, struck)}
    quiet: dict[frozenset[tuple[str, str]], list[float]] = {}
    by_workers: dict[int, list[float]] = {}
    for step in taken.keys() - near:
        quiet.setdefault(frozenset(hosting[step]), []).append(taken[step])
        by_workers.setdefault(len({worker for _, worker in hosting[step]}), []).append(taken[step])
    best = median(by_workers[max(by_workers)]) if by_workers else None
    usual = {who: median(seconds) for who, seconds in quiet.items()}
    # Of workers that never had a quiet step all is lost beyond the pace of all: rather too much than too little.
    lost = sum(max(0.0, taken[step] - usual.get(frozenset(hosting[step]), best or 0.0)) for step in near)
    return TimeSpent(sum(taken.values()), lost, len(taken), best)


def run_job(
    job: BulkJob, losses: Sequence[BulkLoss], *, minutes: float, seed: int, server: ForkServer, folder: Path
) -> dict[str, list[Event]]:
    """Train for so long while the losses happen; the events by worker. Raises BambooError when the job fails."""
    with _started(job, server=server, folder=folder, steps=10**9, seconds=job.seconds) as machine:
        _wait_for_first_step(machine, folder)
        began, source = time.monotonic(), random.Random(seed)
        due: list[float] = []  # when workers come in the place of lost ones
        pending = list(losses)
        while (now := time.monotonic() - began) < 60.0 * minutes:
            if not machine.wait(within_seconds=_LOOK_SECONDS).timed_out:
                raise BambooError(f"the job ended early:\n{machine.output(0)[-3000:]}")
            if pending and pending[0].seconds <= now:
                killed = _kill(machine, pending.pop(0).workers, source)
                due += [now + job.return_seconds] * killed
            for at in [at for at in due if at <= now]:
                due.remove(at)
                machine.join()
        machine.coordinator.request_stop("the time is over")
        outcome = with_stacks(machine, machine.wait(within_seconds=_ENDING_SECONDS))
        if outcome.timed_out or all(outcome.exit_codes.values()):
            raise BambooError(f"the job ended with {outcome.exit_codes}:\n{outcome.output[-3000:]}")
    return {name: list(events) for name, events in read_worker_files(folder / "events").items()}


def undisturbed(job: BulkJob, *, steps: int, server: ForkServer, folder: Path) -> RunSummary:
    """The same steps with nobody lost and without sleep, which changes no number. Raises BambooError when it fails."""
    with _started(job, server=server, folder=folder, steps=steps, seconds=[0.0] * len(job.seconds)) as machine:
        outcome = machine.wait(within_seconds=10.0 * _ENDING_SECONDS)
        if any(outcome.exit_codes.values()) or outcome.timed_out:
            raise BambooError(f"the undisturbed job ended with {outcome.exit_codes}:\n{outcome.output[-3000:]}")
    return summarize(read_events(merge_event_files(folder / "events")))


def _started(job: BulkJob, *, server: ForkServer, folder: Path, steps: int, seconds: Sequence[float]) -> Machine:
    folder.mkdir(parents=True)
    (folder / "deepspeed.json").write_text(json.dumps(job.settings()), encoding="utf-8")
    argv = [str(job.script), "--deepspeed_config", str(folder / "deepspeed.json"), "--steps", str(steps)]
    argv += ["--event-log", str(folder / "events"), "--seconds", *map(str, seconds)]
    nodes = [f"n{rank}" for rank in range(job.workers)]
    return Machine(server, train_worker, workers=job.workers, argv=argv, nodes=nodes)


def _wait_for_first_step(machine: Machine, folder: Path) -> None:
    while not any(step_ends(events) for events in read_worker_files(folder / "events").values()):
        if not machine.wait(within_seconds=_LOOK_SECONDS).timed_out:
            raise BambooError(f"the job ended before its first step:\n{machine.output(0)[-3000:]}")


def _kill(machine: Machine, number: int, source: random.Random) -> int:
    """Kill so many of the workers that take part, but for one; returns how many it were."""
    record = machine.coordinator.epoch()
    if record is None:
        raise BambooError("there is no epoch yet")
    members = machine.coordinator.members()
    ranks = sorted(members[worker].rank for worker in record.members if worker in members)
    chosen = source.sample(ranks, min(number, len(ranks) - 1))
    for rank in chosen:
        with suppress(ProcessLookupError, CoordinatorUnavailable):
            machine.kill_worker(rank)
    return len(chosen)
