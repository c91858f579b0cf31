"""What the plugin promises for GPUs, measured on this machine's: throughput, pauses, joins, restart, equality, memory.

    python scripts/gpu_criteria.py --output runs/gpu_criteria       # all of it: 4 GPUs, at most 15 minutes
    python scripts/gpu_criteria.py --limit-seconds 590              # what does not fit into it is left out
    python scripts/gpu_criteria.py --gpus 2 --parts throughput-8 kills

With fewer than 4 GPUs the models have fewer blocks, so that a stage is what it would be with 4; there is one pipeline,
except for kills, for which workers of two pipelines share GPUs then (and times say little).

Each part is a command of its own (--show prints them) with a hard time limit; one that fails or is late is reported
and does not keep the next from running. Their JSON, pictures and output are in --output, next to verdicts.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.models.sizes import MODEL_SIZES

SCRIPTS = Path(__file__).resolve().parent
_CLEANING_SECONDS = 8.0
_KILLS = 12
COMPARED = "stock,off,lazy,eager-recompute,eager-cpu,eager-none"
_GPUS = 4  # for which the models are large enough


@dataclass(frozen=True)
class Part:
    """One command. ``judge`` makes of its JSON lines with a criterion, what was found and whether that is enough."""

    name: str
    limit_seconds: int
    arguments: tuple[str, ...]
    judge: Callable[[Any], list[str]]


def parts(arguments: argparse.Namespace) -> list[Part]:
    """All parts, the most important first."""
    blocks = MODEL_SIZES[arguments.model].layers * min(arguments.gpus, _GPUS) // _GPUS
    speed = ("bench_gpu.py", "--model", arguments.model, "--blocks", str(blocks))
    eager = ("--mode", "eager", "--offload", "recompute")
    loss = ("bench_failover.py", "--accelerator", "cuda", "--model", arguments.small_model, "--threads", "4", *eager)
    stages = ("--stages", str(arguments.gpus))
    half = ("--stages", str(arguments.gpus // 2), "--pipelines", "2")
    rounds = ("--rounds", str(math.ceil(_KILLS / arguments.gpus)))
    sharing = () if arguments.gpus >= _GPUS else ("--share-gpu",)
    found = [
        Part(
            "throughput-8",
            220,
            (*speed, *stages, "--variants", COMPARED, "--rounds", "5", "--steps", "20"),
            judge_speed,
        ),
        Part("kills", 330, (*loss, *stages, *rounds, "--checkpoint-steps", "40"), judge_losses),
        Part(
            "throughput-16",
            150,
            (*speed, *stages, "--micro-batches", "16", "--variants", COMPARED, "--rounds", "5", "--steps", "5"),
            judge_speed,
        ),
        Part(
            "throughput-2-pipelines",
            100,
            (*speed, *half, "--variants", COMPARED, "--rounds", "5", "--steps", "5"),
            judge_speed,
        ),
        Part(
            "kills-2-pipelines",
            130,
            (*loss, "--stages", "2", "--pipelines", "2", *sharing, "--rounds", "1", "--no-restart"),
            judge_losses,
        ),
        Part(
            "tolerance",
            130,
            (
                *loss,
                *stages,
                "--rounds",
                "1",
                "--least-steps",
                "54",
                "--loss-tolerance",
                "1e-3",
                "--no-restart",
            ),
            judge_losses,
        ),
    ]
    return [part for part in found if part.name != "throughput-2-pipelines" or arguments.gpus >= _GPUS]


def judge_speed(value: Any) -> list[str]:
    """Criteria 1 (throughput against stock) and 5 (memory)."""
    rows, lines = value["variants"], []
    for name, row in rows.items():
        ratio = row["throughput_against_stock"]
        goal = 0.95 if name.startswith("eager") else 1.0
        if name != "stock" and ratio is not None:
            lines.append(f"1 {name} {ratio:.3f} of stock, goal {goal:.2f}: {said(ratio >= goal)}")
    for name, row in rows.items():
        limits = row.get("memory_limit_bytes_by_worker", ())
        # Without offload nothing is promised about memory.
        if name == "eager-none" or not all(limits) or not limits:
            continue
        share = max(peak / limit for peak, limit in zip(row["peak_device_bytes_by_worker"], limits, strict=True))
        lines.append(f"5 {name} peak at most {share:.3f} of the limit, goal 1.10: {said(share <= 1.1)}")
    return lines


def judge_losses(value: Any) -> list[str]:
    """Criteria 2 (pause), 3 (restart) and 4 (equality)."""
    lines = []
    for result in value:
        pauses = sorted(pause["to_recompute"] for pause in result.get("pauses", []))
        if pauses:
            middle, worst = pauses[len(pauses) // 2], pauses[-1]
            fine = middle <= 1.5 and worst <= 3.0
            lines.append(f"2 pause median {middle:.3f} s, worst of {len(pauses)} {worst:.3f} s: {said(fine)}")
            if restart := result.get("restart"):
                times = restart["to_first_step"] / middle
                lines.append(f"3 restart {restart['to_first_step']:.1f} s, {times:.0f} pauses: {said(times >= 10)}")
        difference = result.get("loss_difference")
        lines.append(
            f"4 greatest difference of a loss {difference}, problems {result['problems']}: "
            f"{said(not result['problems'] and difference is not None)}"
        )
    return lines


def said(fine: bool) -> str:
    return "met" if fine else "NOT MET"


def run(part: Part, *, output: Path, limit_seconds: float) -> list[str]:
    """Run one part; its verdicts, or one line that says why there are none."""
    result, log = output / f"{part.name}.json", output / f"{part.name}.txt"
    command = command_of(part, output=output, limit_seconds=limit_seconds)
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    took = f"{part.name} ({time.monotonic() - started:.0f} s)"
    lines = [] if code == 0 else [f"{took}: {'late' if code is None else f'exit code {code}'}, see {log}"]
    if result.exists():
        lines += [f"{took}: {line}" for line in part.judge(json.loads(result.read_text(encoding="utf-8")))]
    return lines


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part that is late: by Ctrl-C, upon which it cleans up, and if that does not help by force."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_CLEANING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command_of(part: Part, *, output: Path, limit_seconds: float) -> list[str]:
    """The command of ``part``; its own limit comes a little before the hard one."""
    script, *rest = part.arguments
    limits = ["--limit-seconds", str(int(limit_seconds - _CLEANING_SECONDS))]
    if script == "bench_failover.py":
        limits += ["--folder", str(output / f"{part.name}-jobs")]
    return [sys.executable, str(SCRIPTS / script), *rest, *limits, "--output", str(output / f"{part.name}.json")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Returns 0 when each ended by itself and met its criteria."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--model", default="gpt2-medium", help="for throughput and memory")
    parser.add_argument("--small-model", default="gpt2-small", help="for losses")
    parser.add_argument("--parts", nargs="+", help="some of them only")
    parser.add_argument(
        "--limit-seconds", type=float, default=900.0, help="for all parts; the last ones may be left out"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_criteria"))
    parser.add_argument("--show", action="store_true", help="print the commands and stop")
    arguments = parser.parse_args(argv)
    chosen = parts(arguments)
    names = [part.name for part in chosen]
    if unknown := sorted(set(arguments.parts or ()) - set(names)):
        parser.error(f"no parts {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [part for part in chosen if not arguments.parts or part.name in arguments.parts]
    if arguments.show:
        print(
            "\n".join(" ".join(command_of(p, output=arguments.output, limit_seconds=p.limit_seconds)) for p in chosen)
        )
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    end, verdicts = time.monotonic() + arguments.limit_seconds, []
    for part in chosen:
        left = end - time.monotonic()
        if left < part.limit_seconds / 2:
            verdicts.append(f"{part.name}: left out, {left:.0f} s are left")
        else:
            verdicts += run(part, output=arguments.output, limit_seconds=min(left, part.limit_seconds))
        (arguments.output / "verdicts.txt").write_text("\n".join(verdicts) + "\n", encoding="utf-8")
    print("\n".join(verdicts))
    return 0 if not any("NOT MET" in line or ", see " in line or "left out" in line for line in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
