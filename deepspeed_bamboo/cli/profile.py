"""``ds_bamboo profile``: what a job has measured of itself, as `simulate`, `advise` and `plan` read it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from deepspeed_bamboo.config.section import CoordinatorConfig
from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.costs import MeasuredJob, measured_job
from deepspeed_bamboo.eventlog.files import read_worker_files
from deepspeed_bamboo.options import file_path, seconds


def add_parser(subparsers: Any) -> None:
    """Register ``profile`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "profile",
        help="measured times of a job, from its event log",
        description="Writes the measured times of stages, of the rest of an iteration, of losses and of moves as JSON: "
        "for `simulate --profile`, `advise --profile` and `plan --profile`. The job needs bamboo.event_log; what "
        "has not happened in it (losses, joins) is left out, and its defaults stay.",
    )
    parser.add_argument("log", type=file_path, help="event log directory of a run")
    parser.add_argument("--output", type=file_path, metavar="FILE", help="default: standard output")
    usual = CoordinatorConfig().lease_seconds
    parser.add_argument(
        "--lease-seconds",
        type=seconds,
        help="coordinator.lease_seconds: until a machine that vanishes is known to be lost, where in the log only "
        f"processes died, which is known at once (default: {usual:g}, where the log has a loss)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the profile; returns 0. Raises EventLogError."""
    files = read_worker_files(arguments.log)
    if not files:
        raise EventLogError(f"no events in {arguments.log}; give the directory that was bamboo.event_log in a run")
    try:
        found = of_vanished_machines(measured_job(files), lease_seconds=arguments.lease_seconds)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise EventLogError(
            f"the events in {arguments.log} lack what a profile is made from ({error!r}); files were changed, or "
            "another version wrote them: let a job run again"
        ) from error
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")
    print(said(found), file=sys.stderr)
    return 0


def of_vanished_machines(found: MeasuredJob, *, lease_seconds: float | None) -> MeasuredJob:
    """With no less until a loss is known than a machine takes that vanishes: on a spot market those are lost.

    ``lease_seconds``: None where nobody has given it. Then a log without losses says nothing of it.
    """
    measured = found.costs.get("detect_seconds")
    if measured is None and lease_seconds is None:
        return found
    least = CoordinatorConfig().lease_seconds if lease_seconds is None else lease_seconds
    return replace(found, costs={**found.costs, "detect_seconds": max(least, measured or 0.0)})


def said(found: MeasuredJob) -> str:
    """In words what the profile rests on."""
    counts = {"loss": found.counts["losses"], "move": found.counts["moves"]}
    parts = [_counted(name, number) for name, number in counts.items() if number]
    ways_back = found.counts.get("ways_back", 0)
    if ways_back:
        parts.append(f"{_counted('time', ways_back)} that survivors went back in place")
    lacking = [_plural(name) for name, number in counts.items() if not number]
    text = _run_said(found)
    text += f"{found.pipelines} x {len(found.profile.forward)} stages, {found.micro_batches} micro-batches"
    if parts:
        text += f"; measured: {', '.join(parts)}"
    if lacking:
        text += f"; no {' and no '.join(lacking)} in this log, so their costs stay what the scenario assumes"
    return text + "."


def _run_said(found: MeasuredJob) -> str:
    if not found.run:
        return ""
    text = f"run {found.run}"
    if found.runs > 1:
        text += f", one of {found.runs} in the log; "
        text += f"{_counted('newer run', found.newer)} ended too early" if found.newer else "the newest"
    return f"{text}: "


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _counted(name: str, number: int) -> str:
    return f"{number} {name if number == 1 else _plural(name)}"
