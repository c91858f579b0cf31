"""Whether failovers leave anything behind: memory, threads and open files of every worker over many of them.

    python scripts/failover_memory.py --failovers 20 --steps 200 --output runs/failover_memory.json

Four workers (one pipeline of 4 stages, gpt2-tiny, CPU and gloo) train; ranks 2 and 3 are killed in turn by SIGKILL and
replaced, each time as soon as all four take part again and are shadowed. So the workers of ranks 0 and 1 live through
all failovers. Each process is measured from outside (/proc) just before each kill, when all is as it was before the
last one. Exit code 1 when a process's resident memory has grown by more than 5 %, or its threads or open files by more
than a few, between the first quarter of its measurements and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.sweep.forked import PRELOAD, train_worker
from deepspeed_bamboo.sweep.job import job_environment
from deepspeed_bamboo.sweep.setups import Setup
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 4
KILLED_IN_TURN = (2, 3)
MOST_GROWTH = 0.05
MOST_MORE = {"threads": 4, "files": 8}
WITHIN_SECONDS = 240.0


@dataclass(frozen=True)
class Sample:
    """What one worker's process holds, before failover number ``failover``."""

    failover: int
    step: int
    rank: int
    pid: int
    resident_kib: int
    threads: int
    files: int

    @classmethod
    def take(cls, pid: int, *, failover: int, step: int, rank: int) -> Sample:
        """Measure process ``pid``. Raises RuntimeError when it is gone: then more was lost than was killed."""
        process = Path("/proc", str(pid))
        try:
            lines = (process / "status").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise RuntimeError(
                f"the worker of rank {rank} is gone though nobody killed it; is the machine too busy?"
            ) from None
        status = dict(line.split(":", 1) for line in lines)
        return cls(
            failover,
            step,
            rank,
            pid,
            resident_kib=int(status["VmRSS"].split()[0]),
            threads=int(status["Threads"]),
            files=len(os.listdir(process / "fd")),  # noqa: PTH208
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job. Returns 0 when nothing has grown."""
    arguments = parse_arguments(argv)
    os.environ.update(job_environment())
    os.environ.pop(FAULTS, None)
    samples = measure(arguments)
    survivors = {s.rank: s.pid for s in samples if s.failover == 0 and s.rank not in KILLED_IN_TURN}
    problems, summary = [], {}
    for rank, pid in survivors.items():
        growth = grown([s for s in samples if s.pid == pid])
        summary[rank] = growth
        print(
            f"rank {rank}: "
            + ", ".join(f"{what} {before:.0f} to {after:.0f}" for what, (before, after) in growth.items())
        )
        problems += [f"rank {rank}: {problem}" for problem in judge(growth)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"growth": summary, "problems": problems, "samples": [asdict(s) for s in samples]}, indent=1)
    arguments.output.write_text(text + "\n", encoding="utf-8")
    print("\n".join(problems) or f"nothing has grown over {arguments.failovers} failovers and {samples[-1].step} steps")
    return 1 if problems else 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The script's arguments. Exits with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failovers", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="at least so many in all (default: 200)")
    parser.add_argument("--mode", choices=("lazy", "eager", "full"), default="eager", help="of redundancy")
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=60.0,
        help="long, since on a busy machine live workers are silent for a while",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/failover_memory"), help="for what the job leaves")
    parser.add_argument("--output", type=Path, default=Path("runs/failover_memory.json"), help="JSON file")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> list[Sample]:
    """Run the job with its failovers; what was measured before each, and at the end."""
    folder: Path = arguments.folder.resolve()
    script = _script(folder, mode=arguments.mode)
    samples: list[Sample] = []
    generations = dict.fromkeys(range(WORKERS), 0)
    with ForkServer(PRELOAD) as server, _machine(server, script, arguments) as machine:
        for failover in range(arguments.failovers + 1):
            least = failover * arguments.steps // arguments.failovers
            step = _when_whole(machine, folder / "events", least_step=least)
            for rank, generation in generations.items():
                pid = machine.worker_pid(rank, generation=generation)
                samples.append(Sample.take(pid, failover=failover, step=step, rank=rank))
            print(
                f"failover {failover}, step {step}: {[s.resident_kib // 1024 for s in samples[-WORKERS:]]} MiB",
                flush=True,
            )
            if failover < arguments.failovers:
                lost = KILLED_IN_TURN[failover % len(KILLED_IN_TURN)]
                machine.kill_worker(lost, generation=generations[lost])
                generations[lost] += 1
                _when_lost(machine, before=failover)
        machine.coordinator.request_stop("measured")
        outcome = machine.wait(within_seconds=WITHIN_SECONDS)
    if any(outcome.exit_codes.values()) or outcome.timed_out:
        raise RuntimeError(f"the job ended with {outcome.exit_codes}:\n{outcome.output}")
    return samples


def grown(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Medians over the first and the last quarter of one process's samples, the start left out as warming up."""
    warm = samples[1:]
    quarter = max(1, len(warm) // 4)
    return {
        what: (
            statistics.median(getattr(s, what) for s in warm[:quarter]),
            statistics.median(getattr(s, what) for s in warm[-quarter:]),
        )
        for what in ("resident_kib", "threads", "files")
    }


def judge(growth: dict[str, tuple[float, float]]) -> list[str]:
    """What has grown too much, in words."""
    problems = []
    before, after = growth["resident_kib"]
    if after > before * (1 + MOST_GROWTH):
        problems.append(f"resident memory grew from {before / 1024:.0f} to {after / 1024:.0f} MiB, over 5 %")
    for what, most in MOST_MORE.items():
        before, after = growth[what]
        if after > before + most:
            problems.append(f"{what} grew from {before:.0f} to {after:.0f}")
    return problems


def _script(folder: Path, *, mode: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "bamboo": {},
    }
    setup = Setup("memory", stages=WORKERS, mode=mode)
    configuration = folder / "deepspeed.json"
    configuration.write_text(json.dumps(setup.settings(base)), encoding="utf-8")
    arguments = setup.arguments(configuration=str(configuration), event_log=str(folder / "events"))
    return [str(ROOT / "scripts" / "train.py"), *arguments, "--steps", "1000000"]


def _machine(server: ForkServer, script: Sequence[str], arguments: argparse.Namespace) -> Machine:
    return Machine(
        server,
        train_worker,
        workers=WORKERS,
        argv=script,
        max_restarts=arguments.failovers,
        restart_seconds=0.1,
        lease_seconds=arguments.lease_seconds,
    )


def _when_whole(machine: Machine, events: Path, *, least_step: int) -> int:
    """Wait until four workers host and shadow one stage each and ``least_step`` is done; returns the step."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while time.monotonic() < deadline:
        record = machine.coordinator.epoch()
        if record is not None and len(record.members) == WORKERS:
            owners = {worker for _, worker in record.placement.owners}
            if len(owners) == WORKERS == len(record.placement.shadows):
                step = _last_step(events)
                if step >= least_step:
                    return step
        time.sleep(0.05)
    raise TimeoutError(f"the job was not whole within {WITHIN_SECONDS:.0f} s:\n{machine.output(0)[-3000:]}")


def _when_lost(machine: Machine, *, before: int) -> None:
    """Wait until the survivors have made an epoch without the killed worker."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while time.monotonic() < deadline:
        record = machine.coordinator.epoch()
        if record is not None and len(record.members) < WORKERS:
            return
        time.sleep(0.005)
    raise TimeoutError(f"nobody noticed loss {before} within {WITHIN_SECONDS:.0f} s")


def _last_step(events: Path) -> int:
    """The last step that the first worker logged; -1 for none."""
    files = sorted(events.glob("events-*-0-0.jsonl"))
    last = -1
    for line in files[0].read_text(encoding="utf-8").splitlines()[-50:] if files else ():
        if '"event": "step"' in line:
            last = max(last, json.loads(line)["step"])
    return last


if __name__ == "__main__":
    sys.exit(main())
