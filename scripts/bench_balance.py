"""How near to the best that is possible work is shared after a loss, with layers of known duration; no GPU.

    python scripts/bench_balance.py                      # a minute or two; --case to choose
    python scripts/bench_balance.py --case 8:4 --uneven

Each case STAGES:WORKERS is a job on that many workers, of which one is killed in a backward. Reported are the
milliseconds of an iteration before the loss, between the loss and the boundary at which stages move, and after it;
how long the move took; and the best that the workers who are left could do with whole stages, by simulation.
Layers sleep, so cores and machine hardly matter; what an iteration takes beyond its passes (messages, the step) is in
the measured figures and not in the simulated ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.eventlog.files import merge_event_files, read_events
from deepspeed_bamboo.sweep.forked import ForkedJobs

SCRIPT = Path(__file__).with_name("train_sleeping.py")
CASES = ("8:4", "16:8", "16:6", "16:4")
KILL_STEP, STEPS = 8, 24
MICRO_BATCHES = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases. Returns 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", nargs="+", default=CASES, metavar="STAGES:WORKERS", help=f"default: {' '.join(CASES)}"
    )
    parser.add_argument("--uneven", action="store_true", help="stages of one to four times --milliseconds")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of a forward (default: 10)")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args(argv)
    results = []
    with ForkedJobs(lease_seconds=6.0, limit_seconds=180.0) as jobs:
        for case in arguments.case:
            stages, workers = (int(part) for part in case.split(":"))
            seconds = [
                arguments.milliseconds / 1000.0 * (1 + (stage % 4 if arguments.uneven else 0))
                for stage in range(stages)
            ]
            results.append({"case": case, "uneven": arguments.uneven, **measure(jobs, seconds, workers=workers)})
            print(line(results[-1]), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["exit_code"] for result in results) else 0


def measure(jobs: ForkedJobs, seconds: Sequence[float], *, workers: int) -> dict[str, Any]:
    """One job, and what is possible."""
    stages = len(seconds)
    fault = {"step": KILL_STEP, "stage": stages // 2, "at": "backward", "micro_batch": 2, "signal": "KILL"}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 1000000,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bamboo": {"faults": [fault]},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deepspeed.json").write_text(json.dumps(settings), encoding="utf-8")
        arguments = [str(SCRIPT), "--deepspeed_config", str(folder / "deepspeed.json"), "--steps", str(STEPS)]
        arguments += ["--event-log", str(folder / "events"), "--seconds", *map(str, seconds)]
        job = jobs(arguments, workers=workers, folder=folder / "job")
        events = list(read_events(merge_event_files(folder / "events"))) if job.exit_code == 0 else []
    profile = Profile(tuple(seconds), tuple(2.0 * one for one in seconds))
    return {
        "exit_code": job.exit_code,
        **figures(events),
        **{f"best_{name}": best(profile, count) for name, count in (("before", workers), ("after", workers - 1))},
    }


def figures(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of an iteration before the loss, until the move, and after it; and of the move. None: there was none."""
    taken: dict[int, float] = {}
    for event in events:
        if event["event"] == "step":
            taken[event["step"]] = max(event["seconds"], taken.get(event["step"], 0.0))
    moves = [e for e in events if e["event"] == "reconfigured" and e["step"] > KILL_STEP]
    moved = moves[0]["step"] if moves else STEPS
    return {
        "before": _median(taken, 5, KILL_STEP),
        "until_moved": _median(taken, KILL_STEP + 1, moved),
        "after": _median(taken, max((move["step"] for move in moves), default=KILL_STEP) + 1, STEPS),
        "moved_at": moved,
        "move_seconds": max((move["seconds"] for move in moves), default=None),
        "transfer_seconds": max((move["transfer_seconds"] for move in moves), default=None),
    }


def best(profile: Profile, workers: int) -> float:
    """Of the placements of whole stages, by simulation."""
    sites = [WorkerSite(f"w{number}", "node") for number in range(workers)]
    grid = Grid(1, len(profile.forward))
    return balance(grid, sites, profile=profile, micro_batches=MICRO_BATCHES, protected=False).seconds


def line(result: dict[str, Any]) -> str:
    """A result for people."""

    def shown(key: str) -> str:
        return "-" if result.get(key) is None else f"{1000.0 * result[key]:.0f} ms"

    return (
        f"{result['case']}{' uneven' if result['uneven'] else ''}: "
        f"before {shown('before')} (best {shown('best_before')}), "
        f"until moved {shown('until_moved')}, after {shown('after')} (best {shown('best_after')}); "
        f"move {shown('move_seconds')}, of that transfer {shown('transfer_seconds')}; exit code {result['exit_code']}"
    )


def _median(taken: dict[int, float], first: int, stop: int) -> float | None:
    values = [taken[step] for step in range(first, stop) if step in taken]
    return median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
