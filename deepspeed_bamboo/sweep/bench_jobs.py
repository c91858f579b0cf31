"""The jobs of the failover benchmark: an undisturbed one, one whose workers are killed in turn and replaced, and
a stock DeepSpeed job that is killed as a whole and restarted from its checkpoint."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.config.section import SECTION
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import BambooError, EventLogError
from deepspeed_bamboo.eventlog.files import merge_event_files, read_events
from deepspeed_bamboo.faults import Fault, FaultScript
from deepspeed_bamboo.sweep.job import JobResult, job_environment, launched
from deepspeed_bamboo.sweep.pauses import Event

FIRST_KILL, STEPS_BETWEEN_KILLS, STEPS_AT_THE_END = 4, 5, 4
_LOOK_SECONDS = 0.01

RunJob = Callable[..., JobResult]


class BenchError(BambooError):
    """A job of the benchmark did not do what it is there for."""


@dataclass(frozen=True)
class BenchSetup:
    """What all jobs of one benchmark train. ``accelerator``: DeepSpeed's name of it, cpu or cuda."""

    model: str = "gpt2-tiny"
    stages: int = 4
    pipelines: int = 1
    micro_batches: int = 8
    micro_batch_samples: int = 4
    mode: str = "lazy"
    accelerator: str = "cpu"
    threads: int = 1
    data: Path | None = None
    offload: str = "cpu"
    overlap: bool = False
    deterministic: bool = True

    @property
    def name(self) -> str:
        return f"{self.model}-{self.pipelines}x{self.stages}-{self.mode}"

    @property
    def grid(self) -> Grid:
        return Grid(self.pipelines, self.stages)

    @property
    def workers(self) -> int:
        return len(self.grid)

    def settings(self, *, plugin: Mapping[str, Any] | None) -> dict[str, Any]:
        """The DeepSpeed configuration; ``plugin``: what its section has besides the mode, None for no section."""
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch_samples,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_print": 1000000,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        }
        if self.accelerator != "cpu":
            settings["bf16"] = {"enabled": True}
        if plugin is None and self.accelerator != "cpu":
            # Without ZeRO DeepSpeed 0.19.8 fails to read its own checkpoints of bf16 training back (KeyError: 0).
            settings["zero_optimization"] = {"stage": 1}
            settings["zero_allow_untested_optimizer"] = True
        if plugin is not None:
            redundancy = {"mode": self.mode, "offload": self.offload, "overlap": self.overlap}
            settings[SECTION] = {"redundancy": redundancy, **plugin}
        return settings

    def arguments(self, *, folder: Path, steps: int) -> list[str]:
        """Arguments of scripts/train.py and its relatives; ``folder`` gets events and holds the configuration."""
        fixed = ["--model", self.model, "--steps", str(steps), "--stages", str(self.stages)]
        fixed += ["--deterministic"] if self.deterministic else []
        fixed += ["--dropout", "0", "--no-tied", "--partition", "parameters"]  # as what was measured so far
        data = [] if self.data is None else ["--data", str(self.data)]
        files = ["--deepspeed_config", str(folder / "deepspeed.json"), "--event-log", str(folder / "events")]
        return [*fixed, *files, *data, "--threads", str(self.threads)]


def kills(setup: BenchSetup, *, rounds: int) -> FaultScript:
    """SIGKILL of each stage's worker of the last pipeline in turn, ``rounds`` times, amid a step's backwards."""
    return FaultScript(
        tuple(
            Fault(
                step=FIRST_KILL + STEPS_BETWEEN_KILLS * (number * setup.stages + stage),
                stage=stage,
                at="backward",
                micro_batch=(setup.micro_batches // 2 + number) % setup.micro_batches,
                pipeline=setup.pipelines - 1,
            )
            for number in range(rounds)
            for stage in range(setup.stages)
        )
    )


def run_training(
    setup: BenchSetup,
    *,
    job: RunJob,
    folder: Path,
    scripts: Path,
    faults: FaultScript,
    steps: int,
    limit_seconds: float,
) -> list[Event]:
    """Train with the plugin; each killed worker is replaced before the next step goes on. Returns the job's events.

    Raises BenchError when the job fails or takes too long.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    restarts = len(faults.faults)
    plugin = {"faults": faults.to_json(), "topology": {"max_restarts": restarts, "restart_seconds": 0.1}}
    _write(folder / "deepspeed.json", setup.settings(plugin=plugin))
    script = [str(scripts / "train_replaced.py"), *setup.arguments(folder=folder, steps=steps)]
    result = job(script, workers=setup.workers, folder=folder, limit_seconds=limit_seconds, max_restarts=restarts)
    if result.exit_code:
        raise BenchError(f"a job ended with {result.exit_code} after {result.seconds:.0f} s; see {result.output}")
    try:
        return list(read_events(merge_event_files(folder / "events")))
    except EventLogError as error:
        raise BenchError(f"{error}; see {result.output}") from error


@dataclass(frozen=True)
class Restart:
    """Killing everything and starting again from the last checkpoint. All times are in seconds.

    ``to_first_step``: from the kill to the end of the first step beyond the checkpoint. ``lost_steps``: steps that
    had been done since the checkpoint. ``mean_lost_work``: half of the time between two checkpoints.
    """

    to_first_step: float
    first_start: float
    step_seconds: float
    checkpoint_steps: int
    lost_steps: int

    @property
    def mean_lost_work(self) -> float:
        return self.checkpoint_steps * self.step_seconds / 2


def run_restart(
    setup: BenchSetup, *, folder: Path, scripts: Path, checkpoint_steps: int, limit_seconds: float
) -> Restart:
    """Train with stock DeepSpeed through its launcher, kill all of it half-way to the second checkpoint, start again.

    Raises BenchError when one of the two jobs fails or takes longer than ``limit_seconds``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write(folder / "deepspeed.json", setup.settings(plugin=None))
    events = folder / "events"
    kill_step = checkpoint_steps + checkpoint_steps // 2
    own = ["--checkpoints", str(folder / "checkpoints"), "--checkpoint-steps", str(checkpoint_steps)]
    script = [str(scripts / "train_checkpointed.py"), *own]
    script += setup.arguments(folder=folder, steps=2 * checkpoint_steps)
    started = time.time()
    environment = job_environment(accelerator=setup.accelerator, threads=setup.threads)
    start = functools.partial(launched, script, workers=setup.workers, environment=environment)
    with start(output=folder / "first.txt") as process:
        first = _wait_for_step(events, kill_step, since=0.0, process=process, limit_seconds=limit_seconds)
        killed = time.time()
        os.killpg(process.pid, signal.SIGKILL)
    with start(output=folder / "second.txt") as process:
        again = _wait_for_step(events, checkpoint_steps, since=killed, process=process, limit_seconds=limit_seconds)
        step = next(event for event in again if event["t"] > killed)
    if step["step"] != checkpoint_steps:
        raise BenchError(f"the restarted job began with step {step['step']}, not {checkpoint_steps}; see {folder}")
    seconds = sorted(event["seconds"] for event in first if event["step"] > 1)
    return Restart(
        to_first_step=step["t"] - killed,
        first_start=first[0]["t"] - started,
        step_seconds=seconds[len(seconds) // 2],
        checkpoint_steps=checkpoint_steps,
        lost_steps=max(event["step"] for event in first) + 1 - checkpoint_steps,
    )


def _wait_for_step(
    events: Path, step: int, *, since: float, process: subprocess.Popen[bytes], limit_seconds: float
) -> list[Event]:
    """All steps logged by any worker, by time, once ``step`` is among those later than ``since``."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        steps = [event for file in events.glob("events-*.jsonl") for event in read_events(file)]
        steps = sorted((event for event in steps if event["event"] == "step"), key=lambda event: float(event["t"]))
        if any(event["t"] > since and event["step"] >= step for event in steps):
            return list(steps)
        if ended:
            raise BenchError(f"stock DeepSpeed ended with {process.poll()} before step {step}; see {events.parent}")
        time.sleep(_LOOK_SECONDS)
    raise BenchError(f"stock DeepSpeed did not reach step {step} within {limit_seconds:.0f} s; see {events.parent}")


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
