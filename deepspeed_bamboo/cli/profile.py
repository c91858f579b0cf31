"""``ds_bamboo profile``: what a job has measured of itself, as `simulate`, `advise` and `plan` read it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.costs import MeasuredJob, measured_job
from deepspeed_bamboo.eventlog.files import read_worker_files


def add_parser(subparsers: Any) -> None:
    """Register ``profile`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "profile",
        help="measured times of a job, from its event log",
        description="Writes the measured times of stages, of the rest of an iteration, of losses and of moves as JSON: "
        "for `simulate --profile`, `advise --profile` and `plan --profile`. The job needs bamboo.event_log; what "
        "has not happened in it (losses, joins) is left out, and its defaults stay.",
    )
    parser.add_argument("log", type=Path, help="event log directory of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the profile; returns 0. Raises EventLogError."""
    files = read_worker_files(arguments.log)
    if not files:
        raise EventLogError(f"no events in {arguments.log}; give the directory that was bamboo.event_log in a run")
    found = measured_job(files)
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, encoding="utf-8")
    print(said(found), file=sys.stderr)
    return 0


def said(found: MeasuredJob) -> str:
    """In words what the profile rests on."""
    lacking = [name for name, count in found.counts.items() if not count]
    text = (
        f"{found.pipelines} x {len(found.profile.forward)} stages, {found.micro_batches} micro-batches; "
        f"{found.counts['losses']} losses and {found.counts['moves']} moves measured"
    )
    if lacking:
        text += f"; no {' and no '.join(lacking)} in this log, so their costs stay what the scenario assumes"
    return text + "."
