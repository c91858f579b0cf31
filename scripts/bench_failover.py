"""The pause after SIGKILL of each stage's worker in turn, against the number of workers, and a restart next to it.

    python scripts/bench_failover.py --pipelines 1 2 3 --output runs/bench_failover.json

Real agents, workers, etcd and signals, on this machine's CPU with gloo. Each job is also compared with the undisturbed
run bit by bit. The restart is what a user does without the plugin: kill everything and start again by the same command;
it is timed from the start of the launcher to the end of the first step and reads no checkpoint, so it is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_bamboo.event_files import merge_event_files, read_events
from deepspeed_bamboo.faults import ENVIRONMENT_VARIABLE, Fault, FaultScript
from deepspeed_bamboo.sweep.cases import LATE_STEP, Case
from deepspeed_bamboo.sweep.forked import ForkedJobs
from deepspeed_bamboo.sweep.job import job_environment, run_job
from deepspeed_bamboo.sweep.rows import Row, table_line, totals
from deepspeed_bamboo.sweep.setups import Setup
from deepspeed_bamboo.sweep.sweep import Sweep, SweepError

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 when every job was bitwise equal to its undisturbed run."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    folder: Path = arguments.folder.resolve()
    results: dict[str, Any] = {}
    rows: list[Row] = []
    for pipelines in arguments.pipelines:
        setup = Setup(f"{pipelines}x{arguments.stages}", pipelines=pipelines, stages=arguments.stages)
        try:
            with ForkedJobs() as job:
                own = list(Sweep(root=ROOT, folder=folder, job=job).rows(kills(setup, rounds=arguments.rounds)))
        except SweepError as error:
            print(error, file=sys.stderr)
            return 1
        rows += own
        for row in own:
            print(table_line(row), flush=True)
        results[setup.name] = {"workers": setup.workers, **totals(own), "rows": [row.to_json() for row in own]}
        if not arguments.no_restart:
            results[setup.name]["restart_seconds"] = restart_seconds(setup, folder=folder / setup.name / "restart")
        print(summary(results[setup.name]), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[1, 2, 3], help="one setup for each number")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="kills per stage")
    parser.add_argument("--no-restart", action="store_true", help="leave the restart out")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_failover"), help="for what jobs leave")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_failover.json"), help="JSON file")
    return parser.parse_args(argv)


def kills(setup: Setup, *, rounds: int) -> list[Case]:
    """SIGKILL in the middle of a step's backwards, of each stage of the last pipeline."""
    faults = [
        Fault(LATE_STEP, stage, "backward", 1 + number % (setup.micro_batches - 1), pipeline=setup.pipelines - 1)
        for number in range(rounds)
        for stage in range(setup.stages)
    ]
    return [Case(setup, FaultScript((fault,))) for fault in faults]


def restart_seconds(setup: Setup, *, folder: Path) -> float | None:
    """From the start of DeepSpeed's launcher to the end of the first step; None when the job failed."""
    started = time.time()

    def timed(script: Sequence[str], **rest: Any) -> Any:
        nonlocal started
        started = time.time()
        return run_job(script, **rest)

    try:
        Sweep(root=ROOT, folder=folder, job=timed).reference(setup)
    except SweepError as error:
        print(error, file=sys.stderr)
        return None
    events = read_events(merge_event_files(folder / setup.name / "undisturbed" / "events"))
    return min(float(event["t"]) for event in events if event["event"] == "step") - started


def summary(result: dict[str, Any]) -> str:
    """One line: workers, the pause, and how much longer a restart takes."""
    totals_ = [failover["pause_seconds"]["total"] for row in result["rows"] for failover in row["failovers"]]
    median = statistics.median(totals_)
    restart = result.get("restart_seconds")
    more = "" if restart is None else f"; a restart takes {restart:.1f} s, {restart / median:.0f} times as long"
    return f"{result['workers']} workers: pause median {median:.3f} s, maximum {max(totals_):.3f} s{more}"


if __name__ == "__main__":
    sys.exit(main())
