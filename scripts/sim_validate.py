"""Is the simulator right about this engine? A real job of layers that sleep, next to what is predicted; no GPU.

    python scripts/sim_validate.py                 # calibration and three seeded traces; 19 minutes
    python scripts/sim_validate.py --seeds 1 --steps 40

Workers are killed, join and are drained by the clock, as on a spot market that is many times as fast. The profile of
the simulation is what `ds_bamboo profile` reads from the log of the first job, in which a few such things happen; of
the others it knows what happens when, and nothing else. Exit code 1 if throughput is off by more than 5 % in one of
the runs, or the mean pause, join or transfer by more than 20 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.sim_validation import (
    Comparison,
    Incident,
    SleepingJob,
    calibrated,
    compare,
    drawn,
    run_job,
)
from deepspeed_bamboo.testing.fork_server import ForkServer

SCRIPT = Path(__file__).with_name("train_sleeping.py")
MOST_THROUGHPUT_ERROR, MOST_ERROR = 0.05, 0.2
CALIBRATION_SEED = 0  # what happens to the profile's job is drawn like the traces
_MICRO_BATCHES, _PASSES = 8, 3  # a backward takes twice as long as a forward
_QUIET_STEPS = 8  # at the start: after some quiet steps the engine knows what stages take, and places by it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs. Returns 1 if a prediction is off by more than it may be."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    # A rough guess, for how many incidents there is time.
    step_seconds = (_MICRO_BATCHES + arguments.workers - 1) * _PASSES * arguments.milliseconds / 1000.0
    first_seconds, every = _QUIET_STEPS * step_seconds, arguments.every_seconds

    def trace(seed: int, steps: int) -> tuple[Incident, ...]:
        count = max(0, int(0.8 * (steps - _QUIET_STEPS) * step_seconds / every))
        return drawn(seed, workers=arguments.workers, count=count, first_seconds=first_seconds, every_seconds=every)

    job = SleepingJob(
        script=SCRIPT,
        seconds=(arguments.milliseconds / 1000.0,) * arguments.workers,
        workers=arguments.workers,
        micro_batches=_MICRO_BATCHES,
        steps=arguments.steps,
        limit_seconds=60.0 + 4.0 * max(arguments.steps, arguments.calibration_steps) * step_seconds,
    )
    results: dict[str, Any] = {}
    wrong = False
    with tempfile.TemporaryDirectory() as name, ForkServer(PRELOAD) as server:
        folder, profile = Path(name), Path(name) / "profile.json"
        longer = replace(job, steps=arguments.calibration_steps)
        first = run_job(longer, trace(CALIBRATION_SEED, longer.steps), server=server, folder=folder / "calibration")
        measured, join_seconds = calibrated(first, path=profile)
        results["profile"] = {**measured.to_json(), "join_seconds": join_seconds}
        print(json.dumps(results["profile"]), flush=True)
        for seed in arguments.seeds:
            happened = run_job(job, trace(seed, job.steps), server=server, folder=folder / f"seed{seed}")
            found = compare(job, happened, profile, join_seconds=join_seconds)
            results[f"seed {seed}"] = {**asdict(found), "incidents": happened.incidents}
            wrong |= report(seed, found)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises SystemExit where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--calibration-steps", type=int, default=200, help="the profile's job; more losses (default: 200)"
    )
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a stage's forward (default: 40)")
    parser.add_argument("--every-seconds", type=float, default=2.5, help="between incidents (default: 2.5)")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    return parser.parse_args(argv)


def report(seed: int, found: Comparison) -> bool:
    """Print a comparison; returns whether it is off by more than it may be."""
    measured, predicted = found.steps_per_second
    wrong = abs(found.throughput_error) > MOST_THROUGHPUT_ERROR
    parts = [f"seed {seed}: {measured:.3f} steps/s measured, {predicted:.3f} predicted ({found.throughput_error:+.1%})"]
    for name, (is_so, said) in found.means.items():
        error = found.error(name)
        if error is None:
            continue
        wrong |= abs(error) > MOST_ERROR
        parts.append(f"{name} {is_so:.3f} s, {said:.3f} s predicted ({error:+.0%})")
    print("; ".join(parts) + (" -- OFF" if wrong else ""), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
