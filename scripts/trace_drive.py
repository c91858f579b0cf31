"""A recorded trace of spot machines, 60 times as fast, drives a real job: is it right, and is the simulator? No GPU.

    python scripts/trace_drive.py --trace TRACES/aws-p3-us-east.csv            # twenty minutes, two cores
    python scripts/trace_drive.py --trace configs/sim/example-trace.csv --calibrate 0.4-1.6 --hours 0.4-1.6 --one-in 2

One in so many of the trace's machines is an instance of a fleet that `ds_bamboo fleet` has made, at EC2 as moto plays
it: an agent with its worker. It goes when the trace says, and the fleet gets another one when the trace says. Before
that half of them (or those that the trace warns) get a notice of two minutes, two seconds here, by a metadata service
of their own. Stages sleep, so that each is a GPU.

The job trains through --calibrate first, whose log gives the profile, then through --hours with each policy, twice. It
checks losses and digest of a job that nobody disturbs, bit by bit, and that each micro-batch was trained once; samples
per dollar of the fleet's own records within 5 % of what the simulator says of these hours by that profile; and that
`proactive` is worth no less than `fixed`, but for what two runs of the same policy differ by. Exit code 1 if one of
these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.traces import read_trace, segment
from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.sim_validation import SleepingJob, predicted
from deepspeed_bamboo.sweep.step_record import ways_back
from deepspeed_bamboo.sweep.trace_run import (
    Driven,
    detections,
    drive,
    problems_of,
    profiled,
    sped_up,
    thinned,
    undisturbed,
    with_notices,
)
from deepspeed_bamboo.testing.fork_server import ForkServer

SCRIPT = Path(__file__).resolve().with_name("train_sleeping.py")
MOST_ERROR = 0.05
POLICIES = ("fixed", "proactive")
CALIBRATION = "calibration"
_NOTICE_SECONDS = 120.0
_MICRO_BATCHES, _SAMPLES = 8, 2
_MEMORY_SECONDS, _LEASE_SECONDS = 2.0, 3.0


@dataclass(frozen=True)
class Slice:
    """A part of the trace, as fast as it is driven: what happens, and how many seconds it takes."""

    events: tuple[MachineEvent, ...]
    seconds: float

    @property
    def machines(self) -> int:
        """There at its start."""
        return sum(event.at_milliseconds == 0 and event.change is Change.ADD for event in self.events)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` describes. Returns 1 when something does not hold."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before, tested = (part(arguments, hours) for hours in (arguments.calibrate, arguments.hours))
    profile = folder / "profile.json"
    results: dict[str, Any] = {}
    wrong: list[str] = []
    runs = [
        (f"{policy} {number}", policy) for number in range(1, arguments.rounds + 1) for policy in arguments.policies
    ]
    with ForkServer(PRELOAD) as server:
        join_seconds = 0.0
        for name, policy in [(CALIBRATION, POLICIES[0]), *runs]:
            its = before if name == CALIBRATION else tested
            job = sleeping_job(arguments, policy=policy, workers=its.machines)
            driven, problems = driven_job(arguments, job, its, server=server, folder=folder / name.replace(" ", "-"))
            results[name] = {**figures(driven), "policy": policy, "problems": problems}
            print(f"{name}: {said(driven)}" + "".join(f"\n  {line}" for line in problems), flush=True)
            wrong += [f"{name}: {line}" for line in problems]
            if name == CALIBRATION:
                join_seconds = profiled(driven, path=profile)
                results["profile"] = {**json.loads(profile.read_text(encoding="utf-8")), "join_seconds": join_seconds}
            else:
                wrong += compared(arguments, job, driven, profile, join_seconds, results[name])
    wrong += worse_than_fixed([results[name] for name, _ in runs])
    (folder / "figures.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong) or "all holds")
    return int(bool(wrong))


def part(arguments: argparse.Namespace, hours: tuple[float, float]) -> Slice:
    """Those hours of the trace. Raises TraceError and ScenarioError."""
    start, end = hours
    whole = read_trace(arguments.trace, generator=random.Random(arguments.seed))
    events = segment(whole, from_hours=start, to_hours=end).events
    events = sped_up(thinned(events, one_in=arguments.one_in, capacity=arguments.stages), times=arguments.times)
    notice = round(1000.0 * _NOTICE_SECONDS / arguments.times)
    events = with_notices(events, share=arguments.noticed, milliseconds=notice, seed=arguments.seed)
    return Slice(events, 3600.0 * (end - start) / arguments.times)


def sleeping_job(arguments: argparse.Namespace, *, policy: str, workers: int) -> SleepingJob:
    """What is trained."""
    return SleepingJob(
        script=SCRIPT,
        seconds=(arguments.milliseconds / 1000.0,) * arguments.stages,
        workers=workers,
        micro_batches=_MICRO_BATCHES,
        steps=10**9,
        limit_seconds=0.0,
        lease_seconds=_LEASE_SECONDS,
        optimizer={"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
        bamboo={
            "policy": policy,
            **({"policy_interval_seconds": _interval_seconds(arguments)} if policy == "proactive" else {}),
            "checkpoint": {"memory_interval_seconds": _MEMORY_SECONDS, "memory_copies": arguments.stages},
        },
    )


def _interval_seconds(arguments: argparse.Namespace) -> float:
    """A minute of the trace, in which the proactive policy counts."""
    return 60.0 / float(arguments.times)


def driven_job(
    arguments: argparse.Namespace, job: SleepingJob, its: Slice, *, server: ForkServer, folder: Path
) -> tuple[Driven, list[str]]:
    """A run, and what differs from the undisturbed one."""
    driven = drive(
        job,
        its.events,
        seconds=its.seconds,
        notice_seconds=_NOTICE_SECONDS / arguments.times,
        server=server,
        folder=folder / "disturbed",
    )
    steps = max(event["step"] for event in driven.events if event["event"] == "finished")
    reference = undisturbed(job, steps=steps, server=server, folder=folder / "undisturbed")
    return driven, problems_of(driven, reference, folder=folder / "disturbed", job=job)


def figures(driven: Driven) -> dict[str, Any]:
    """Of a run, for people and for JSON. A dollar is one of the trace's hours, which are shorter here."""
    events = driven.events
    samples = driven.steps * _MICRO_BATCHES * _SAMPLES
    changes = [event.change for event in driven.machines if event.at_milliseconds]
    gone = {worker for event in events if event["event"] == "failover" for worker in event.get("lost", ())}
    left = {worker for event in events for worker in event.get("leaving", ())}
    back = ways_back(events)
    return {
        "samples": samples,
        "seconds": driven.seconds,
        "dollars": driven.dollars,
        "samples_per_dollar": samples / driven.dollars,
        "machines": {change.name.lower(): changes.count(change) for change in Change},
        "changes": [(event.at_milliseconds, event.change.name.lower(), event.node) for event in driven.machines],
        "detections": detections(driven),
        "losses": len(gone),
        "drains": len(left),
        "ways_back": [{"source": way.source, "redone": way.redone, "seconds": way.seconds} for way in back],
    }


def said(driven: Driven) -> str:
    """The same in a line."""
    its = figures(driven)
    machines, back = its["machines"], its["ways_back"]
    return (
        f"{its['samples']} samples in {its['seconds']:.1f} s; {machines['add']} machines came and {machines['remove']} "
        f"went, {machines['notice']} of them warned: {its['losses']} workers lost, {its['drains']} drained, "
        f"{len(back)} times back to memory"
    )


def compared(
    arguments: argparse.Namespace,
    job: SleepingJob,
    driven: Driven,
    profile: Path,
    join_seconds: float,
    its: dict[str, Any],
) -> list[str]:
    """Next to the simulator's word, which goes into ``its``, too; a line if that is off by more than it may be."""
    live = {
        "policy": job.bamboo["policy"],
        "policy_interval_seconds": _interval_seconds(arguments),
        "fatal": "in-place",
        "memory_checkpoint_seconds": _MEMORY_SECONDS,
        "memory_copies": arguments.stages,
    }
    prediction = predicted(
        driven.machines,
        profile,
        join_seconds=join_seconds,
        steps=driven.steps,
        capacity=2 * arguments.stages,
        live=live,
        dollars_per_hour=driven.dollars_per_hour,
    )
    is_so, would_be = its["samples_per_dollar"], its["samples"] / prediction.dollars
    error = would_be / is_so - 1.0
    its |= {"predicted_samples_per_dollar": would_be, "predicted_seconds": prediction.seconds, "error": error}
    print(
        f"  {is_so / arguments.times:.0f} samples a dollar at the trace's pace, {would_be / arguments.times:.0f} "
        f"predicted ({error:+.1%})",
        flush=True,
    )
    wrong = abs(error) > MOST_ERROR
    return [f"{live['policy']}: the prediction is off by {error:+.1%}, more than {MOST_ERROR:.0%}"] if wrong else []


def worse_than_fixed(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line if the proactive policy is worth less, on average, by more than what runs of the same policy differ by."""
    worth = {policy: [its["samples_per_dollar"] for its in runs if its["policy"] == policy] for policy in POLICIES}
    if not all(worth.values()):
        return []
    fixed, proactive = (fmean(worth[policy]) for policy in POLICIES)
    share = proactive / fixed - 1.0
    noise = max(max(found) / min(found) - 1.0 for found in worth.values())
    known = len(runs) > len(POLICIES)
    line = f"proactive is worth {share:+.1%} next to fixed; runs of the same policy differ by "
    line += f"up to {noise:.1%}" if known else "an unknown amount, since there was one of each"
    print(line, flush=True)
    return [line] if known and share < -noise else []


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a trace of ds_bamboo simulate")
    parser.add_argument("--calibrate", type=_hours, default=(0.45, 3.0), help="hours of it (default: 0.45-3)")
    parser.add_argument("--hours", type=_hours, default=(4.95, 8.0), help="hours that are compared (default: 4.95-8)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: both")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each policy (default: 2)")
    parser.add_argument("--times", type=float, default=60.0, help="as fast as the trace (default: 60)")
    parser.add_argument("--one-in", type=int, default=4, help="so many machines of the trace (default: 4)")
    parser.add_argument("--stages", type=int, default=8, help="and machines at most (default: 8)")
    parser.add_argument("--milliseconds", type=float, default=25.0, help="of a stage's forward (default: 25)")
    parser.add_argument("--noticed", type=float, default=0.5, help="share that is warned, where the trace warns nobody")
    parser.add_argument("--seed", type=int, default=1, help="of who is warned (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path("runs/trace-drive"), help="what the jobs leave")
    return parser.parse_args(argv)


def _hours(text: str) -> tuple[float, float]:
    start, _, end = text.partition("-")
    return float(start), float(end)


if __name__ == "__main__":
    sys.exit(main())
