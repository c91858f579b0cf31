"""Takes workers in bulk from a job that trains for a while, and says how much of its time was useful; no GPU.

    python scripts/bulk_losses.py                                       # 20 minutes, and a minute for the check
    python scripts/bulk_losses.py --minutes 3 --every-minutes 1 --output runs/bulk.json

In each interval two to all but one of the workers are killed by SIGKILL at once, drawn from the seed; as many join
later. The others go back to copies in each other's memory, and on. At the end the job must have the losses and the
digest of one that loses nobody. Layers sleep, so other work on the machine hardly matters. `ds_bamboo profile EVENTS`
reads what losses cost from its event log, for `ds_bamboo simulate --profile`. Exit code 1 if a number differs, or if
less than 0.95 of the time was useful.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepspeed_bamboo.eventlog.files import merge_event_files, read_events
from deepspeed_bamboo.eventlog.summary import differences, summarize
from deepspeed_bamboo.sweep.bulk_run import BulkJob, drawn, run_job, time_spent, undisturbed
from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.step_record import redone_problems, ways_back
from deepspeed_bamboo.testing.fork_server import ForkServer

SCRIPT = Path(__file__).resolve().with_name("train_sleeping.py")
LEAST_USEFUL = 0.95


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` describes. Returns 1 when a number differs, or too little of the time was useful."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    job = BulkJob(
        script=SCRIPT,
        seconds=(arguments.milliseconds / 1000.0,) * arguments.stages,
        workers=arguments.workers,
        micro_batches=arguments.micro_batches,
        return_seconds=arguments.return_seconds,
        checkpoint={"memory_interval_seconds": arguments.memory_seconds, "memory_copies": arguments.workers},
        redundancy={"copies": arguments.copies},
    )
    losses = drawn(
        arguments.seed, workers=job.workers, minutes=arguments.minutes, every_minutes=arguments.every_minutes
    )
    print("; ".join(f"{loss.workers} of {job.workers} lost at {loss.seconds:.0f} s" for loss in losses), flush=True)
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    with ForkServer(PRELOAD) as server:
        files = run_job(
            job, losses, minutes=arguments.minutes, seed=arguments.seed, server=server, folder=folder / "disturbed"
        )
        events = [event for found in files.values() for event in found]
        result = summarize(read_events(merge_event_files(folder / "disturbed" / "events")))
        reference = undisturbed(job, steps=result.final_step or 0, server=server, folder=folder / "undisturbed")
    spent, back = time_spent(events), ways_back(events)
    problems = differences(reference, result) + redone_problems(events, reference.losses)
    redone = sum(way.redone for way in back)
    print(
        f"{spent.steps} steps in {spent.seconds:.0f} s, of which {spent.lost_seconds:.1f} s were lost: useful time "
        f"{spent.useful_share:.4f}, samples {spent.samples_share:.3f} of those without losses\n"
        f"went back {len(back)} times ({sum(way.source == 'memory' for way in back)} to memory), {redone} steps done "
        f"again, longest {max((way.seconds for way in back), default=0.0):.2f} s\n"
        + ("\n".join(problems) or "losses and digest are those of the job that lost nobody")
    )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        figures = {**asdict(spent), "useful_share": spent.useful_share, "samples_share": spent.samples_share}
        figures |= {"losses": [asdict(loss) for loss in losses], "ways_back": [asdict(way) for way in back]}
        arguments.output.write_text(json.dumps({**figures, "problems": problems}, indent=1), encoding="utf-8")
    return int(bool(problems) or spent.useful_share < LEAST_USEFUL)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="for how long the job trains (default: 20)")
    parser.add_argument("--every-minutes", type=float, default=10.0, help="one bulk loss in each (default: 10)")
    parser.add_argument("--return-seconds", type=float, default=30.0, help="until others join instead (default: 30)")
    parser.add_argument("--memory-seconds", type=float, default=5.0, help="between copies in memory (default: 5)")
    parser.add_argument("--copies", type=int, default=1, choices=(1, 2), help="shadows of each stage (default: 1)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=15.0, help="of a stage's forward (default: 15)")
    parser.add_argument("--seed", type=int, default=1, help="of who is lost when (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bulk-losses"), help="what the jobs leave")
    parser.add_argument("--output", type=Path, help="JSON file for the figures (default: none)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
