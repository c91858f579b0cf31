"""What a loss costs: SIGKILL of each stage's worker in turn, a worker that takes its place, and a restart next to it.

    python scripts/bench_failover.py                                      # 4 workers, CPU, gpt2-tiny, 3 kills of each
    python scripts/bench_failover.py --accelerator cuda --model gpt2-small gpt2-medium
    python scripts/bench_failover.py --pipelines 1 2 3 4 --rounds 1 --no-restart   # pause against number of workers

Per model and number of pipelines: one undisturbed job; one job in which each kill hits the worker of the next stage of
the last pipeline in the middle of a step's backwards, and another worker joins in its place before the next kill;
their losses and digests are compared bit by bit. Then what a user does without the plugin: stock DeepSpeed is killed
as a whole and started again from its checkpoint. Agents, workers, etcd, signals and communication are real. With
--start fork a worker is forked from a process that has imported everything, so that its replacement is there at once;
that has no influence on the pauses. Restarts go through DeepSpeed's launcher. Every job has a time limit and leaves
nothing running; what is known so far is in the JSON file after each job.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared_gpu import TOLD

from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.eventlog.summary import differences, summarize
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.models.sizes import MODEL_SIZES
from deepspeed_bamboo.sweep.bench_jobs import (
    FIRST_KILL,
    STEPS_AT_THE_END,
    STEPS_BETWEEN_KILLS,
    BenchSetup,
    RunJob,
    kills,
    run_restart,
    run_training,
)
from deepspeed_bamboo.sweep.forked import ForkedJobs
from deepspeed_bamboo.sweep.job import job_environment, run_job
from deepspeed_bamboo.sweep.pauses import PARTS, joins, pauses, spread, straight_line, undisturbed_seconds

SCRIPTS = Path(__file__).resolve().parent
MODELS = tuple(size.name for size in MODEL_SIZES.values() if size.causal)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 when all was bitwise equal and no job failed."""
    arguments = parse_arguments(argv)
    results: list[dict[str, Any]] = []
    setups = [
        BenchSetup(
            model=model,
            stages=arguments.stages,
            pipelines=pipelines,
            micro_batches=arguments.micro_batches,
            mode=arguments.mode,
            accelerator=arguments.accelerator,
            threads=arguments.threads,
            data=arguments.data,
            offload=arguments.offload,
            overlap=arguments.overlap,
            deterministic=arguments.loss_tolerance is None,
        )
        for model in arguments.model
        for pipelines in arguments.pipelines
    ]
    with jobs(arguments) as job:
        for setup in setups:
            result: dict[str, Any] = {"name": setup.name, "workers": setup.workers, "problems": []}
            results.append(result)
            for part in (measure_losses, measure_restart):
                started = time.monotonic()
                try:
                    part(setup, result, job=job, arguments=arguments)
                except BambooError as error:
                    result["problems"].append(str(error))
                result.setdefault("took_seconds", {})[part.__name__] = time.monotonic() - started
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print("\n".join(table(result)), flush=True)
    print("\n".join(growth(results)))
    return 1 if any(result["problems"] for result in results) else 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["gpt2-tiny"], choices=MODELS)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--pipelines", type=int, nargs="+", default=[1], help="one benchmark for each number")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="kills of each stage's worker (default: 3)")
    parser.add_argument("--most-kills", type=int, help="end after so many (default: all of all rounds)")
    parser.add_argument("--mode", default="lazy", choices=("lazy", "eager", "full"), help="redundancy.mode")
    parser.add_argument("--overlap", action="store_true", help="redundancy.overlap")
    parser.add_argument("--offload", default="cpu", choices=("cpu", "none", "recompute"), help="redundancy.offload")
    parser.add_argument(
        "--loss-tolerance",
        type=float,
        help="without deterministic algorithms: losses of kills and undisturbed job may differ by so much "
        "(default: deterministic, and bitwise equal)",
    )
    parser.add_argument("--least-steps", type=int, default=0, help="train for so many at least")
    parser.add_argument("--share-gpu", action="store_true", help="several workers on each GPU: times say little")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per worker")
    parser.add_argument("--data", type=Path, help="file or folder of text (default: Python's own sources)")
    parser.add_argument("--start", default="fork", choices=("fork", "launcher"), help="how workers are started")
    parser.add_argument("--checkpoint-steps", type=int, default=10, help="of the job that is restarted")
    parser.add_argument("--no-restart", action="store_true", help="leave the restart out")
    parser.add_argument("--limit-seconds", type=float, default=300.0, help="for each job (default: 300)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_failover"), help="for what jobs leave")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_failover.json"), help="JSON file")
    arguments = parser.parse_args(argv)
    if arguments.share_gpu and not arguments.no_restart:
        parser.error("stock DeepSpeed, which is restarted, needs a GPU for each worker; add --no-restart")
    return arguments


@contextlib.contextmanager
def jobs(arguments: argparse.Namespace) -> Iterator[RunJob]:
    """How jobs with the plugin are run."""
    environment = job_environment(accelerator=arguments.accelerator, threads=arguments.threads)
    if arguments.start == "launcher":
        yield functools.partial(launched, environment=environment)
        return
    # Forked processes can use a GPU only if the one they are forked from has not touched the driver.
    os.environ.update(environment, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    if arguments.share_gpu:
        os.environ[TOLD] = "1"
    with ForkedJobs() as job:
        yield job


def launched(script: Sequence[str], *, max_restarts: int, **rest: Any) -> Any:
    """Through DeepSpeed's launcher, which finds in the configuration how often a worker is replaced."""
    return run_job(script, **rest)


def measure_losses(setup: BenchSetup, result: dict[str, Any], *, job: RunJob, arguments: argparse.Namespace) -> None:
    """The undisturbed job and the one with kills. Raises BenchError when one of them fails."""
    script = FaultScript(kills(setup, rounds=arguments.rounds).faults[: arguments.most_kills])
    steps = max(arguments.least_steps, FIRST_KILL + STEPS_BETWEEN_KILLS * len(script.faults) + STEPS_AT_THE_END)
    folder = arguments.folder.resolve() / setup.name
    run = functools.partial(
        run_training, setup, job=job, scripts=SCRIPTS, steps=steps, limit_seconds=arguments.limit_seconds
    )
    plain = run(folder=folder / "undisturbed", faults=FaultScript())
    result["undisturbed_step_seconds"] = undisturbed_seconds(plain)
    events = run(folder=folder / "kills", faults=script)
    found, taken_in = pauses(events), joins(events)
    result["pauses"] = [asdict(pause) for pause in found]
    result["joins"] = [asdict(join) for join in taken_in]
    result["kills"] = len(script.faults)
    if len(found) != len(script.faults):
        result["problems"].append(f"{len(found)} of {len(script.faults)} kills led to a failover")
    if len(taken_in) != len(script.faults):
        result["problems"].append(f"{len(taken_in)} of {len(script.faults)} killed workers were replaced")
    result["loss_difference"] = greatest_difference(plain, events)
    if arguments.loss_tolerance is None:
        result["problems"] += differences(summarize(plain), summarize(events))
    elif not result["loss_difference"] <= arguments.loss_tolerance:
        result["problems"].append(f"a loss differs by {result['loss_difference']:.3g}")


def greatest_difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Between the losses of the same step of two jobs; infinite when they don't have the same steps."""
    first, second = summarize(one).losses, summarize(other).losses
    if first.keys() != second.keys() or not first:
        return math.inf
    return max(abs(first[step] - second[step]) for step in first)


def measure_restart(setup: BenchSetup, result: dict[str, Any], *, job: RunJob, arguments: argparse.Namespace) -> None:
    """The restart from a checkpoint. Raises BenchError when that fails."""
    if arguments.no_restart:
        return
    restart = run_restart(
        setup,
        folder=arguments.folder.resolve() / setup.name / "restart",
        scripts=SCRIPTS,
        checkpoint_steps=arguments.checkpoint_steps,
        limit_seconds=arguments.limit_seconds,
    )
    result["restart"] = {**asdict(restart), "mean_lost_work": restart.mean_lost_work}


def table(result: dict[str, Any]) -> list[str]:
    """What was found, as text."""
    lines = [f"{result['name']}, {result['workers']} workers"]
    found = result.get("pauses", [])
    rows = [(part, [pause["parts"][part] for pause in found]) for part in PARTS]
    rows += [
        ("kill to first recomputed instruction", [pause["to_recompute"] for pause in found]),
        ("kill to end of the iteration", [pause["to_iteration_end"] for pause in found]),
        ("the same iteration without a loss", [pause["undisturbed"] for pause in found]),
        ("regroup of the slowest survivor", [pause["slowest_regroup"] for pause in found]),
        ("new shadows, waited for", [pause["protect"] for pause in found if pause["protect"] is not None]),
        ("join: survivors' pause", [join["pause"] for join in result.get("joins", [])]),
        ("join: state transfer in it", [join["transfer"] for join in result.get("joins", [])]),
        ("join: complete, after the kill", [join["after_loss"] for join in result.get("joins", [])]),
    ]
    for name, values in rows:
        if values:
            numbers = "  ".join(f"{kind} {value:8.3f}" for kind, value in spread(values).items())
            lines.append(f"  {name:<38} {numbers} s  ({len(values)})")
    if restart := result.get("restart"):
        lines.append(f"  restart, kill to first new step          {restart['to_first_step']:.1f} s")
        lines.append(f"  and work lost with it, on average        {restart['mean_lost_work']:.1f} s")
        if found:
            pause = spread(pause["to_recompute"] for pause in found)["median"]
            both = restart["to_first_step"] + restart["mean_lost_work"]
            lines.append(f"  restart / pause {restart['to_first_step'] / pause:.0f}, with lost work {both / pause:.0f}")
    verdict = "losses and digest are bitwise those of the undisturbed job" if not result["problems"] else "WRONG:"
    if result.get("loss_difference"):
        verdict = f"no loss differs by more than {result['loss_difference']:.3g}; problems: {len(result['problems'])}"
    return [*lines, f"  {verdict}", *(f"  {problem}" for problem in result["problems"])]


def growth(results: Sequence[dict[str, Any]]) -> list[str]:
    """How the pause grows with the number of workers, when it was measured for several."""
    points = [
        (r["workers"], spread(p["to_recompute"] for p in r["pauses"])["median"]) for r in results if "pauses" in r
    ]
    if len({workers for workers, _ in points}) < 2:
        return []
    constant, slope = straight_line(points)
    return [
        f"pause = {constant:.3f} s + {1000 * slope:.2f} ms per worker; for 1,000 workers that makes "
        f"{constant + 1000 * slope:.1f} s"
    ]


if __name__ == "__main__":
    sys.exit(main())
