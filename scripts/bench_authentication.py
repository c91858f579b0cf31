"""What authentication and the pulse cost in a whole job: the pause of a loss, and the time of a step.

    python scripts/bench_authentication.py               # 4 workers, 4 rounds of 12 kills each, 5 minutes
    python scripts/bench_authentication.py --rounds 8 --kills 16

Workers are processes of this machine, with agents, etcd and gloo; their layers sleep, so that more workers than cores
don't wait for each other's computing. In turn, in the same run, there is a job of each variant of
train_untrusting.py: ``as-is``, ``bare`` (channels without authentication) and ``no-pulse``. In each job the worker of
one stage after the other is killed amid a step's backwards, and another takes its place before the next kill.

Printed are medians with quartiles, and how much more time the job takes as it is, with 95 % intervals by resampling
kills and steps. The load average of before and after is printed, too: on a busy machine the intervals are wide.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from deepspeed_bamboo.eventlog.files import merge_event_files, read_events
from deepspeed_bamboo.sweep.bench_jobs import BenchError
from deepspeed_bamboo.sweep.forked import ForkedJobs
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.pauses import Event, pauses

SCRIPT = Path(__file__).resolve().parent / "train_untrusting.py"
VARIANTS = ("as-is", "bare", "no-pulse")
STAGES, MICRO_BATCHES = 4, 8
_FIRST_KILL, _BETWEEN_KILLS, _AT_THE_END = 6, 6, 6
_RESAMPLES = 2000

Found = dict[str, dict[str, list[float]]]
"""By measure and variant, seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="jobs of each variant (default: 4)")
    parser.add_argument("--kills", type=int, default=12, help="in each job (default: 12)")
    parser.add_argument("--forward-seconds", type=float, default=0.004, help="of a stage; a backward takes twice that")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="for each job (default: 120)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_authentication"), help="for what jobs leave")
    arguments = parser.parse_args(argv)
    os.environ.update(job_environment(accelerator="cpu", threads=1))
    found: Found = defaultdict(lambda: defaultdict(list))
    print(f"load before {os.getloadavg()[0]:.1f}", flush=True)
    with ForkedJobs() as job:
        for number in range(arguments.rounds):
            for place in range(len(VARIANTS)):
                variant = VARIANTS[(number + place) % len(VARIANTS)]
                folder = arguments.folder.resolve() / f"{variant}-{number}"
                for measure, seconds in measured(run(variant, folder=folder, job=job, arguments=arguments)).items():
                    found[measure][variant] += seconds
    print(f"load after {os.getloadavg()[0]:.1f}\n" + "\n".join(table(found)))
    return 0


def run(variant: str, *, folder: Path, job: ForkedJobs, arguments: argparse.Namespace) -> list[Event]:
    """One job; its events. Raises BenchError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = _FIRST_KILL + _BETWEEN_KILLS * arguments.kills + _AT_THE_END
    kills = [
        {"step": _FIRST_KILL + _BETWEEN_KILLS * number, "stage": number % STAGES, "at": "backward", "micro_batch": 4}
        for number in range(arguments.kills)
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 1000000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "bamboo": {"faults": kills, "topology": {"max_restarts": len(kills), "restart_seconds": 0.1}},
    }
    (folder / "deepspeed.json").write_text(json.dumps(settings), encoding="utf-8")
    script = [str(SCRIPT), variant, "--deepspeed_config", str(folder / "deepspeed.json"), "--steps", str(steps)]
    script += ["--event-log", str(folder / "events"), "--seconds", *[str(arguments.forward_seconds)] * STAGES]
    result = job(script, workers=STAGES, folder=folder, limit_seconds=arguments.limit_seconds, max_restarts=len(kills))
    if result.exit_code:
        raise BenchError(f"a job ended with {result.exit_code} after {result.seconds:.0f} s; see {result.output}")
    events = list(read_events(merge_event_files(folder / "events")))
    if len(pauses(events)) != len(kills):
        raise BenchError(f"{len(pauses(events))} of {len(kills)} kills led to a failover; see {folder}")
    return events


def measured(events: Sequence[Event]) -> dict[str, list[float]]:
    """In seconds: of each kill the times to what follows it; of each step far from a kill its own."""
    disturbed = {e["step"] for e in events if e["event"] in ("fault", "failover", "reconfigured", "joined")}
    quiet = {  # of the workers that log a step, the slowest
        step: max(e["seconds"] for e in events if e["event"] == "step" and e["step"] == step)
        for step in {e["step"] for e in events if e["event"] == "step"}
        if step > 1 and not {step, step - 1, step - 2} & disturbed
    }
    found = pauses(events)
    return {
        "kill to first instruction done again": [pause.to_recompute for pause in found],
        "  of it, regrouping of the slowest": [pause.slowest_regroup for pause in found],
        "kill to the end of the iteration": [pause.to_iteration_end for pause in found],
        "a step without a loss": list(quiet.values()),
    }


def table(found: Found) -> list[str]:
    """Lines of text, in milliseconds."""
    lines = []
    for measure, by_variant in found.items():
        lines.append(measure)
        for variant, seconds in by_variant.items():
            low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
            text = f"  {variant:9} {median:8.2f} ms   ({low:.2f} to {high:.2f}, {len(seconds)})"
            if variant != VARIANTS[0]:
                least, most = interval_of_ratio(by_variant[VARIANTS[0]], seconds)
                ratio = statistics.median(by_variant[VARIANTS[0]]) / statistics.median(seconds)
                text += f"   as it is {100 * (ratio - 1):+.1f} % ({100 * (least - 1):+.1f} to {100 * (most - 1):+.1f})"
            lines.append(text)
    return lines


def interval_of_ratio(one: Sequence[float], other: Sequence[float], *, seed: int = 1) -> tuple[float, float]:
    """Between which bounds the ratio of the medians of ``one`` and ``other`` lies, with 95 % of the resamples."""
    numbers = random.Random(seed)

    def resampled(values: Sequence[float]) -> float:
        return statistics.median(numbers.choices(values, k=len(values)))

    ratios = sorted(resampled(one) / resampled(other) for _ in range(_RESAMPLES))
    return ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40]


if __name__ == "__main__":
    sys.exit(main())
