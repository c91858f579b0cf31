"""One job to whose machines many things happen, and what became of it next to the undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_bamboo.config.section import load_deepspeed_settings
from deepspeed_bamboo.coordination import CoordinatorUnavailable, EpochRecord, Member
from deepspeed_bamboo.coordination.process_state import is_running
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.errors import BambooError, EventLogError
from deepspeed_bamboo.eventlog.files import Event, merge_event_files, read_events
from deepspeed_bamboo.eventlog.summary import RunSummary, differences, summarize
from deepspeed_bamboo.sweep.forked import with_stacks
from deepspeed_bamboo.sweep.gate import Gate, gated_worker
from deepspeed_bamboo.sweep.happenings import Happening, Kind, counts_of, faults_of
from deepspeed_bamboo.sweep.step_record import WayBack, redone_problems, step_problems, ways_back
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine, Outcome

_LOOK_EVERY_SECONDS = 0.01
_ACT_SECONDS = 60.0
_ZONES = ("1", "2", "3")
# As often as it costs little, and copies with everybody, so that whoever is left can go back.
_CHECKPOINTS = {"memory_interval_seconds": 1.0, "memory_copies": 100, "interval_minutes": 0.05}
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RandomRun:
    """A job: its grid, its steps, its length in time. ``script``: scripts/train.py; ``base``: a configuration."""

    script: Path
    base: Path
    grid: Grid
    steps: int
    micro_batches: int = 4
    limit_seconds: float = 600.0


@dataclass(frozen=True)
class Verdict:
    """What became of a run. ``problems`` is empty when all that was to happen did, and nothing changed."""

    problems: tuple[str, ...]
    happened: Mapping[str, int]
    seconds: float
    digest: str | None
    pauses_seconds: tuple[float, ...]
    ways_back: tuple[WayBack, ...] = ()

    @property
    def redone_steps(self) -> int:
        """How many steps were done again, in all."""
        return sum(way.redone for way in self.ways_back)

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write."""
        return {**asdict(self), "redone_steps": self.redone_steps}


def run_undisturbed(run: RandomRun, *, server: ForkServer, folder: Path) -> RunSummary:
    """The summary of the run in which nothing happens. Raises BambooError when it fails."""
    outcome, logs = _run(run, [], server=server, folder=folder)
    summary = summarize(_merged(folder))
    if any(outcome.exit_codes.values()) or summary.digest is None or not logs:
        raise BambooError(f"the undisturbed run ended with {outcome.exit_codes}:\n{outcome.output[-3000:]}")
    return summary


def run_with(
    run: RandomRun, happenings: Sequence[Happening], *, reference: RunSummary, server: ForkServer, folder: Path
) -> Verdict:
    """Carry ``happenings`` out and compare with ``reference``. Never raises for what the job does."""
    started = time.monotonic()
    problems: list[str] = []
    hands: list[_Hands] = []
    outcome, logs = _run(run, happenings, server=server, folder=folder, problems=problems, seen=hands.append)
    everything = [event for events in logs.values() for event in events]
    back = ways_back(everything)
    summary: RunSummary | None = None
    try:
        summary = summarize(_merged(folder))
        problems += differences(reference, summary)
    except EventLogError as error:
        problems.append(str(error))
    stuck = [rank for rank, code in outcome.exit_codes.items() if code is None]
    if stuck:
        problems.append(f"agents of ranks {stuck} still ran after {run.limit_seconds:.0f} s")
    problems += step_problems(
        logs,
        grid=run.grid,
        steps=run.steps,
        micro_batches=run.micro_batches,
        cut_short=_cut_short(happenings, back),
    )
    problems += redone_problems(everything, reference.losses)
    happened, counted = _counted(everything, happenings, lost_at_once=sum(h.bulk_lost for h in hands))
    problems += counted
    (folder / "output.txt").write_text(outcome.output, encoding="utf-8")
    return Verdict(
        problems=tuple(problems),
        happened=happened,
        seconds=time.monotonic() - started,
        digest=None if summary is None else summary.digest,
        pauses_seconds=() if summary is None else tuple(f.pause_seconds.get("total", 0.0) for f in summary.failovers),
        ways_back=back,
    )


def _run(
    run: RandomRun,
    happenings: Sequence[Happening],
    *,
    server: ForkServer,
    folder: Path,
    problems: list[str] | None = None,
    seen: Callable[[_Hands], None] = lambda _: None,
) -> tuple[Outcome, dict[str, list[Event]]]:
    gate_folder = folder / "gate"
    gate_folder.mkdir(parents=True)
    gate = Gate(gate_folder)
    outside = [happening for happening in happenings if happening.fault is None or happening.workers > 1]
    gate.close_before(happening.step for happening in outside)
    machine = Machine(
        server,
        gated_worker,
        workers=len(run.grid),
        argv=[str(gate_folder), *script_of(run, happenings, folder=folder)],
        nodes=[f"node{rank}" for rank in range(len(run.grid))],
        zones=[_ZONES[rank % len(_ZONES)] for rank in range(len(run.grid))],
    )
    deadline = time.monotonic() + run.limit_seconds
    with machine:
        hands = _Hands(machine, gate, problems if problems is not None else [])
        seen(hands)
        for number, happening in enumerate(outside):
            # Where the worker was lost that would have waited there, the job may only wait later.
            steps = [later.step for later in outside[number:]]
            if not _wait(lambda these=steps: any(map(gate.is_reached, these)), machine, until=deadline):  # type: ignore[misc]
                break
            hands.do(happening)
        outcome = machine.wait(within_seconds=max(1.0, deadline - time.monotonic()))
        outcome = with_stacks(machine, outcome)
    return outcome, {path.name: read_events(path) for path in sorted((folder / "events").glob("events-*.jsonl"))}


class _Hands:
    """Does from outside what is to happen, and waits until the job could know of it.

    Attributes:
        bulk_lost: how many workers have gone with others at once.
    """

    def __init__(self, machine: Machine, gate: Gate, problems: list[str]) -> None:
        self._machine = machine
        self._gate = gate
        self._problems = problems
        self._nodes = 0
        self.bulk_lost = 0

    def do(self, happening: Happening) -> None:
        """Carry ``happening`` out while the job waits, and let it go on. What does not work is noted."""
        actions: Mapping[Kind, Callable[[Happening], None]] = {
            Kind.JOIN: self._join,
            Kind.DRAIN: self._drain,
            Kind.NOTICE: self._notice,
            Kind.ETCD: self._kill_etcd,
            Kind.BULK: self._kill_many,
        }
        try:
            actions[happening.kind](happening)
        except (BambooError, TimeoutError) as error:
            self._problems.append(f"{happening}: {error}")
        self._gate.open(happening.step)

    def _join(self, happening: Happening) -> None:
        self._nodes += 1
        zone = _ZONES[happening.step % len(_ZONES)]
        rank = _persist(lambda: self._machine.join(node=f"late{self._nodes}", zone=zone))
        self._await(lambda: any(m.rank == rank for m in self._machine.coordinator.members().values()), "to register")

    def _drain(self, happening: Happening) -> None:
        node = self._member(happening.coordinate).node
        _persist(
            lambda: self._machine.coordinator.request_drain(node, deadline_seconds=60.0, reason="asked to for a test")
        )

    def _notice(self, happening: Happening) -> None:
        member = self._member(happening.coordinate)
        self._machine.signal_agent(member.rank, signal.SIGUSR1)
        self._await(lambda: member.node in self._machine.coordinator.draining(), "for the agent to ask for a drain")

    def _kill_etcd(self, happening: Happening) -> None:
        pid = self._machine.etcd.pid
        os.kill(pid, signal.SIGKILL)
        self._await(lambda: self._machine.etcd.pid != pid, "for etcd to be started again")

    def _kill_many(self, happening: Happening) -> None:
        """Its script kills one of them; the others go as soon as that is seen, wherever they are then."""
        record, members = _persist(self._epoch), _persist(self._machine.coordinator.members)
        pids = {members[w].rank: self._machine.worker_pid(members[w].rank) for w in record.members if w in members}
        self._gate.open(happening.step)
        if self._gate.is_reached(happening.step):  # else the one that its script kills is gone
            # Stages may move before the step begins, so whose instruction it will be is not known yet.
            gone = f"for the owner of {happening.coordinate} to go"
            self._await(lambda: not all(map(is_running, pids.values())), gone)
        others = sorted(rank for rank, pid in pids.items() if is_running(pid))
        number = max(0, min(happening.workers - 1, len(others) - 1))
        for rank in random.Random(happening.step).sample(others, number):
            with suppress(ProcessLookupError):
                self._machine.kill_worker(rank)
        self.bulk_lost += len(pids) - len(others) + number

    def _epoch(self) -> EpochRecord:
        record = self._machine.coordinator.epoch()
        if record is None:
            raise BambooError("there is no epoch yet")
        return record

    def _member(self, coordinate: Coordinate | None) -> Member:
        """The worker that hosts ``coordinate`` now."""
        if coordinate is None:
            raise BambooError("this needs a coordinate")
        return _persist(lambda: self._machine.coordinator.members()[self._epoch().placement.owner(coordinate)])

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _ACT_SECONDS
        while not _persist(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_ACT_SECONDS:.0f} s {what}")
            time.sleep(_LOOK_EVERY_SECONDS)


def _persist(action: Callable[[], _Result]) -> _Result:
    """What ``action`` returns, once etcd, which may just have been killed, answers. Raises CoordinatorUnavailable."""
    deadline = time.monotonic() + _ACT_SECONDS
    while True:
        try:
            return action()
        except CoordinatorUnavailable:
            if time.monotonic() > deadline:
                raise


def _wait(condition: Callable[[], bool], machine: Machine, *, until: float) -> bool:
    """Whether ``condition`` came true before the time, and before the job ended."""
    while not condition():
        ended = machine.wait(within_seconds=_LOOK_EVERY_SECONDS)
        if time.monotonic() > until or not ended.timed_out:
            return False
    return True


def script_of(run: RandomRun, happenings: Sequence[Happening], *, folder: Path) -> Iterator[str]:
    """The command line of scripts/train.py, whose configuration is written to ``folder``."""
    settings = load_deepspeed_settings(run.base)
    settings["train_micro_batch_size_per_gpu"] = 2
    settings["gradient_accumulation_steps"] = run.micro_batches
    section = {**settings["bamboo"], "faults": faults_of(happenings).to_json()}
    if any(happening.workers > 1 for happening in happenings):
        section["checkpoint"] = {"dir": str(folder / "checkpoints"), **_CHECKPOINTS}
    settings["bamboo"] = section
    configuration = folder / "deepspeed.json"
    configuration.write_text(json.dumps(settings), encoding="utf-8")
    yield from (str(run.script), "--model", "gpt2-tiny", "--steps", str(run.steps), "--stages", str(run.grid.stages))
    yield from ("--deepspeed_config", str(configuration), "--event-log", str(folder / "events"))


def _cut_short(happenings: Iterable[Happening], back: Iterable[WayBack]) -> set[int]:
    """The steps in which somebody may have been killed, or gone back, before or after it had logged them."""
    bulk = {happening.step for happening in happenings if happening.kind is Kind.BULK}
    return {step - behind for step in bulk | {way.step for way in back} for behind in (0, 1)}


def _counted(
    events: Sequence[Event], happenings: Sequence[Happening], *, lost_at_once: int
) -> tuple[dict[str, int], list[str]]:
    """How much happened of each kind, and a line for each kind of which it was not as much as was to happen."""
    happened, wanted = _happened(events), counts_of(happenings)
    expected = {
        "killed": wanted[Kind.KILL] + wanted[Kind.BULK],
        "joined": wanted[Kind.JOIN],
        "drained": wanted[Kind.DRAIN] + wanted[Kind.NOTICE],
    }
    problems = [
        f"{happened[name]} of {count} were {name}" for name, count in expected.items() if happened[name] != count
    ]
    happened |= {"etcd killed": wanted[Kind.ETCD]}
    if wanted[Kind.BULK]:
        # Of each bulk loss one worker was killed by its script.
        happened |= {"killed": happened["killed"] - wanted[Kind.BULK]}
        happened |= {"bulk losses": wanted[Kind.BULK], "lost at once": lost_at_once}
    return happened, problems


def _happened(events: Sequence[Event]) -> dict[str, int]:
    changes = {(e["epoch"], tuple(e["leaving"])) for e in events if e["event"] in ("reconfigured", "joined")}
    return {
        "killed": sum(event["event"] == "fault" for event in events),
        "joined": sum(event["event"] == "joined" for event in events),
        "drained": len({worker for _, leaving in changes for worker in leaving}),
    }


def _merged(folder: Path) -> list[Event]:
    return read_events(merge_event_files(folder / "events"))
