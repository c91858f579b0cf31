"""Runs a sweep's jobs as forks of one process that has everything imported: a job starts in milliseconds.

Agents, workers, coordinator and communication are the real ones; only ``deepspeed``'s launcher and the
start of Python are left out. ``job.run_job`` runs the same job with them.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from deepspeed_bamboo.config.section import SECTION, load_deepspeed_settings, parse_bamboo_section
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.grid_told import grid_environment, told_pipelines
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.sweep.job import PAST_LIMIT, JobResult
from deepspeed_bamboo.sweep.outside import OutsideKill, OutsideKiller
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import PRELOAD as AGENTS_PRELOAD
from deepspeed_bamboo.testing.harness import Machine, Outcome

PRELOAD = (
    *AGENTS_PRELOAD,
    "deepspeed_bamboo.runtime.preloaded",
    "deepspeed_bamboo.models.catalog",
    "deepspeed_bamboo.sweep.gate",
    "deepspeed_bamboo.sweep.forked",
    "rich.progress",
)
CONFIGURATION = "--deepspeed_config"
_SHOW_STACKS = signal.SIGUSR2
_STACKS_SECONDS = 1.0
_RESTART_SECONDS = 0.1


class ForkedJobs:
    """Called like ``run_job``. One fork server and one etcd for all jobs; use as a context manager.

    Jobs find this process's environment as it was when the context manager was made. On a busy machine a worker may
    be silent for longer than ``lease_seconds``, and counts as lost.
    """

    def __init__(
        self, *, lease_seconds: float = 3.0, limit_seconds: float = 90.0, server: ForkServer | None = None
    ) -> None:
        """``server``: one that is there already, with PRELOAD imported; it stays, and jobs find its environment."""
        self._lease_seconds, self._limit_seconds = lease_seconds, limit_seconds
        self._etcd = PrivateEtcd()
        try:
            self._server = ForkServer(PRELOAD) if server is None else server
        except BaseException:
            self._etcd.stop()
            raise
        self._is_own = server is None

    def __enter__(self) -> ForkedJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_own:
            self._server.close()
        self._etcd.stop()

    def __call__(
        self,
        script: Sequence[str],
        *,
        workers: int,
        folder: Path,
        outside: OutsideKill | None = None,
        limit_seconds: float | None = None,
        max_restarts: int = 0,
    ) -> JobResult:
        """Run a training script with its arguments; as ``run_job`` does, in much less time.

        ``max_restarts``: how often each slot replaces a killed worker, at once.
        """
        limit_seconds = self._limit_seconds if limit_seconds is None else limit_seconds
        folder.mkdir(parents=True, exist_ok=True)
        with Machine(
            self._server,
            train_worker,
            workers=workers,
            argv=script,
            endpoints=(str(self._etcd.endpoint),),
            max_restarts=max_restarts,
            restart_seconds=_RESTART_SECONDS,
            lease_seconds=self._lease_seconds,
            environment=_grid_told(script),
        ) as machine:
            killer = OutsideKiller(outside, events=folder / "events", strike=machine.kill_worker) if outside else None
            with killer or nullcontext():
                outcome = machine.wait(within_seconds=limit_seconds)
            outcome = with_stacks(machine, outcome)
        output = folder / "output.txt"
        output.write_text(outcome.output, encoding="utf-8")
        codes = [code for code in outcome.exit_codes.values() if code]
        code = PAST_LIMIT if outcome.timed_out else next(iter(codes), 0)
        return JobResult(code, outcome.seconds, output, kills=int(killer is not None and killer.struck))


def _grid_told(script: Sequence[str]) -> dict[str, str]:
    """What launched agents tell their workers of the grid, by the configuration among the arguments of ``script``."""
    if CONFIGURATION not in script:
        return {}
    settings = load_deepspeed_settings(script[script.index(CONFIGURATION) + 1])
    config = parse_bamboo_section(settings.get(SECTION, {}))
    return dict(grid_environment(told_pipelines(config)))


def with_stacks(machine: Machine, outcome: Outcome) -> Outcome:
    """``outcome``; of a job past its limit with, in each output, where the threads of a worker that hangs are."""
    if not outcome.timed_out:
        return outcome
    for rank, code in outcome.exit_codes.items():
        if code is None:
            with suppress(ProcessLookupError, BambooError):
                machine.kill_worker(rank, _SHOW_STACKS)
    return replace(machine.wait(within_seconds=_STACKS_SECONDS), exit_codes=outcome.exit_codes)


def train_worker(argv: list[str]) -> None:
    """In a worker's process: run the script named first in ``argv`` with the plugin, as a launched worker does."""
    from deepspeed_bamboo.runtime.main import main

    faulthandler.register(_SHOW_STACKS, all_threads=True)
    sys.exit(main(["--", *argv]))
