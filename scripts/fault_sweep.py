"""Kills workers at every instruction, one job each, and checks that nothing of the result changes.

    python scripts/fault_sweep.py --profile quick
    python scripts/fault_sweep.py --profile first --only 'M4/KILL-0.2-*' --results runs/stage2.json

Each case is compared with the undisturbed run of the same setup: the digest of the final state and every
logged loss, bit by bit. Exit code 1 when one differs, or when a scripted fault did not happen. What jobs
with a difference leave (output, events) stays in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.sweep.cases import PROFILES, select
from deepspeed_bamboo.sweep.forked import ForkedJobs
from deepspeed_bamboo.sweep.job import job_environment, run_job
from deepspeed_bamboo.sweep.rows import Row, table_line, total_lines, totals
from deepspeed_bamboo.sweep.sweep import RunJob, Sweep

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep that ``argv`` describes. Returns 0 when every case is bitwise equal."""
    arguments = parse_arguments(argv)
    cases = select(arguments.profile, only=arguments.only)
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or f"no case of profile {arguments.profile} matches --only")
        return 0 if cases else 1
    os.environ.update(job_environment())
    os.environ.pop(FAULTS, None)
    rows: list[Row] = []
    with jobs_of(arguments) as job:
        sweep = Sweep(root=ROOT, folder=arguments.folder.resolve(), job=job)
        for row in sweep.rows(cases, jobs=arguments.jobs):
            rows.append(row)
            print(table_line(row), flush=True)
            write_results(arguments.results, rows)
    print("\n".join(total_lines(rows)))
    print(f"results: {arguments.results}")
    return 0 if all(row.passed for row in rows) else 1


def jobs_of(arguments: argparse.Namespace) -> AbstractContextManager[RunJob]:
    """What runs one job."""
    if arguments.launcher:
        return nullcontext(run_job)
    return ForkedJobs(lease_seconds=arguments.lease_seconds, limit_seconds=arguments.limit_seconds)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="quick", help="which cases (default: quick)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="cases whose name matches; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1; each has 4 or so workers)")
    parser.add_argument("--launcher", action="store_true", help="start each job with deepspeed's launcher; slower")
    parser.add_argument(
        "--lease-seconds", type=float, default=3.0, help="a worker silent for longer is lost (default: 3; busy: more)"
    )
    parser.add_argument("--limit-seconds", type=float, default=90.0, help="of one job (default: 90; busy: more)")
    parser.add_argument("--folder", type=Path, default=Path("runs/fault_sweep"), help="for what jobs leave")
    parser.add_argument("--results", type=Path, default=Path("runs/fault_sweep.json"), help="JSON file for the rows")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    return parser.parse_args(argv)


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows so far, and their totals."""
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"totals": totals(rows), "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
