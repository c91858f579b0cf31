"""Runs one training job of a sweep on this machine, through DeepSpeed's launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.sweep.outside import OutsideKill

PAST_LIMIT = -1

_STOP_AFTER_SECONDS = 10.0


@dataclass(frozen=True)
class JobResult:
    """How a job ended. ``output``: the file with everything it printed."""

    exit_code: int  # PAST_LIMIT: it took too long and was ended
    seconds: float
    output: Path
    kills: int = 0  # how many came from outside


def run_job(
    script: Sequence[str],
    *,
    workers: int,
    folder: Path,
    outside: OutsideKill | None = None,
    limit_seconds: float = 180.0,
    environment: Mapping[str, str] | None = None,
) -> JobResult:
    """Run a training script with its arguments on ``workers`` workers of this machine.

    ``folder`` gets the output; nothing of the job is left running afterwards. ``environment``: the whole of it,
    default :func:`job_environment`. Raises ValueError for ``outside``: the launcher doesn't tell which process is
    which worker.
    """
    if outside is not None:
        raise ValueError(f"{outside} needs to know the workers' processes; run it without the launcher")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    start = time.monotonic()
    arguments = ["--module", "deepspeed_bamboo.launch", *script]
    with launched(arguments, workers=workers, output=output, environment=environment or job_environment()) as process:
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = PAST_LIMIT
    return JobResult(code, time.monotonic() - start, output)


@contextmanager
def launched(
    arguments: Sequence[str], *, workers: int, output: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """DeepSpeed's launcher with ``arguments`` (a script or --module, and theirs) for so many workers of this machine.

    It leads a process group of its own; what is left of that at the end of the block is ended.
    """
    command = ["deepspeed", "--num_accelerators", str(workers), "--master_port", str(free_port()), *arguments]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end_group(process)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job_environment(*, accelerator: str = "cpu", threads: int = 1) -> dict[str, str]:
    """What a job finds in its environment: this process's, without its faults, on so many CPU threads a worker."""
    inherited = {name: value for name, value in os.environ.items() if name != FAULTS}
    return {**inherited, "DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": str(threads)}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the launcher's process group still holds: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None and not _group_lives(process.pid):
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + _STOP_AFTER_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or _group_lives(process.pid)):
            time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
