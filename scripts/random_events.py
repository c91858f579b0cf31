"""Lets 100 random things happen to the machines of one job, and checks that nothing of its result changes.

    python scripts/random_events.py --seed 1
    python scripts/random_events.py --seed 2 --steps 60 --events 20 --pipelines 2 --stages 2
    python scripts/random_events.py --seed 1 --bulk

Workers are killed by SIGKILL at an instruction, join, are drained, get notices by a signal; etcd is killed by SIGKILL
and started again. With --bulk two to all but one of the workers are lost at once, too; then the job keeps checkpoints
in memory and on disk, to which the others go back, and the steps done again are counted. The job must end with the
undisturbed run's digest and losses (those of steps done again, too), each coordinate stepped once a step, each
micro-batch used once and in order. Exit code 1 when not; what the job left then stays in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.sweep.forked import PRELOAD
from deepspeed_bamboo.sweep.happenings import draw
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.random_run import RandomRun, run_undisturbed, run_with
from deepspeed_bamboo.testing.fork_server import ForkServer

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` describes. Returns 0 when nothing of the result changed."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    grid = Grid(arguments.pipelines, arguments.stages)
    run = RandomRun(
        script=ROOT / "scripts" / "train.py",
        base=ROOT / "configs" / "cpu-demo.json",
        grid=grid,
        steps=arguments.steps,
        limit_seconds=arguments.limit_seconds,
    )
    happenings = draw(
        arguments.seed,
        grid=grid,
        steps=run.steps,
        count=arguments.events,
        micro_batches=run.micro_batches,
        workers=len(grid),
        most=len(grid) + 2,
        bulk=arguments.bulk,
    )
    if arguments.list:
        print("\n".join(map(str, happenings)))
        return 0
    folder = arguments.folder.resolve() / f"seed{arguments.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    with ForkServer(PRELOAD) as server:
        reference = run_undisturbed(run, server=server, folder=folder / "undisturbed")
        verdict = run_with(run, happenings, reference=reference, server=server, folder=folder / "disturbed")
    pauses = verdict.pauses_seconds
    print(", ".join(f"{name} {count}" for name, count in verdict.happened.items()), f"in {verdict.seconds:.0f} s")
    if pauses:
        print(f"pause of a loss: median {statistics.median(pauses):.3f} s, longest {max(pauses):.3f} s")
    if arguments.bulk:
        memory = sum(way.source == "memory" for way in verdict.ways_back)
        print(
            f"went back {len(verdict.ways_back)} times, {memory} of them to memory; {verdict.redone_steps} steps done "
            f"again, at most {max((way.redone for way in verdict.ways_back), default=0)} at a time; longest "
            f"{max((way.seconds for way in verdict.ways_back), default=0.0):.2f} s"
        )
    print(f"digest {verdict.digest}, undisturbed {reference.digest}")
    print(
        "\n".join(verdict.problems) or "nothing changed: digest, losses, order and use of the micro-batches are equal"
    )
    if arguments.results is not None:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(verdict.to_json(), indent=1), encoding="utf-8")
    if verdict.problems:
        return 1
    shutil.rmtree(folder)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of what happens and when (default: 1)")
    parser.add_argument("--steps", type=int, default=300, help="of the job (default: 300)")
    parser.add_argument("--events", type=int, default=100, help="how many things happen (default: 100)")
    parser.add_argument("--bulk", action="store_true", help="two to all but one of the workers are lost at once, too")
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="for the whole job (default: 900)")
    parser.add_argument("--folder", type=Path, default=Path("runs/random-events"), help="what the jobs leave")
    parser.add_argument("--results", type=Path, help="JSON file for the figures (default: none)")
    parser.add_argument("--list", action="store_true", help="only say what would happen")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
