"""What a second shadow costs: the time of a step and the memory of a worker, with ``redundancy.copies`` 1 and 2.

    python scripts/bench_copies.py --rounds 3 --steps 60

Four workers on this machine (one pipeline of 4 stages, CPU and gloo) train, with one copy and with two in turn. Printed
are the medians over all rounds: milliseconds of a step, without the first ones; of them processor time of all four
workers together, which depends less on what else runs here; and the private memory of a worker's process, without what
all share since they are forks of one process.
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

from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.sweep.forked import PRELOAD, train_worker
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 4
COPIES = (1, 2)
_WARMING_UP_STEPS = 5
_WITHIN_SECONDS = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and print a line for each number of copies. Returns 0."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    os.environ.pop(FAULTS, None)
    seconds: dict[int, list[float]] = {copies: [] for copies in COPIES}
    mebibytes: dict[int, list[float]] = {copies: [] for copies in COPIES}
    processor: dict[int, list[float]] = {copies: [] for copies in COPIES}
    with ForkServer(PRELOAD) as server:
        for number in range(arguments.rounds):
            for copies in COPIES:
                folder = arguments.folder.resolve() / f"{number}-{copies}"
                times, busy, memory = measure(server, folder, copies=copies, arguments=arguments)
                seconds[copies] += times
                processor[copies].append(busy)
                mebibytes[copies] += memory
                print(
                    f"round {number}, copies {copies}: {1000 * statistics.median(times):.1f} ms a step, "
                    f"{1000 * busy:.1f} ms of processor time, {', '.join(f'{each:.1f}' for each in memory)} MiB",
                    flush=True,
                )
    for copies in COPIES:
        print(
            f"copies {copies}: {1000 * statistics.median(seconds[copies]):.1f} ms a step "
            f"({statistics.median(seconds[copies]) / statistics.median(seconds[1]):.3f} of one copy's), "
            f"{1000 * statistics.median(processor[copies]):.1f} ms of processor time, "
            f"{statistics.median(mebibytes[copies]):.1f} MiB a worker"
        )
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="measured in each job (default: 60)")
    parser.add_argument("--model", default="gpt2-tiny", help="of scripts/train.py (default: gpt2-tiny)")
    parser.add_argument("--mode", choices=("lazy", "eager"), default="lazy", help="of redundancy")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_copies"), help="for what the jobs leave")
    return parser.parse_args(argv)


def measure(
    server: ForkServer, folder: Path, *, copies: int, arguments: argparse.Namespace
) -> tuple[list[float], float, list[float]]:
    """Seconds of each step of one job, seconds of processor time of a step of all workers, and MiB of each worker."""
    events = folder / "events"
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": arguments.micro_batches,
        "steps_per_print": 1000000,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "bamboo": {"redundancy": {"mode": arguments.mode, "copies": copies}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for old in events.glob("events*.jsonl"):
        old.unlink()
    (folder / "deepspeed.json").write_text(json.dumps(settings), encoding="utf-8")
    script = [str(ROOT / "scripts" / "train.py"), "--model", arguments.model, "--stages", str(WORKERS)]
    script += ["--deepspeed_config", str(folder / "deepspeed.json"), "--event-log", str(events), "--steps", "1000000"]
    with Machine(server, train_worker, workers=WORKERS, argv=script, lease_seconds=60.0) as machine:
        first = _when_done(machine, events, steps=_WARMING_UP_STEPS)
        pids = [machine.worker_pid(rank, generation=0) for rank in range(WORKERS)]
        begun = sum(map(processor_seconds, pids))
        times = _when_done(machine, events, steps=_WARMING_UP_STEPS + arguments.steps)
        busy = (sum(map(processor_seconds, pids)) - begun) / (len(times) - len(first))
        memory = [private_mebibytes(pid) for pid in pids]
        machine.coordinator.request_stop("measured")
        outcome = machine.wait(within_seconds=_WITHIN_SECONDS)
    if any(outcome.exit_codes.values()) or outcome.timed_out:
        raise RuntimeError(f"the job ended with {outcome.exit_codes}:\n{outcome.output}")
    return times[_WARMING_UP_STEPS:], busy, memory


def processor_seconds(pid: int) -> float:
    """That a process has used so far."""
    fields = Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def private_mebibytes(pid: int) -> float:
    """Of a process: what no other process shares."""
    lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _when_done(machine: Machine, events: Path, *, steps: int) -> list[float]:
    """Wait for so many steps; the seconds of each."""
    deadline = time.monotonic() + _WITHIN_SECONDS
    while time.monotonic() < deadline:
        files = sorted(events.glob("events-*-0-0.jsonl"))
        lines = files[0].read_text(encoding="utf-8").splitlines() if files else []
        found = [json.loads(line)["seconds"] for line in lines if '"event": "step"' in line and line.endswith("}")]
        if len(found) >= steps:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"fewer than {steps} steps within {_WITHIN_SECONDS:.0f} s:\n{machine.output(0)[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
