"""Small jobs for tests: worker processes from the fork server, without launcher, over a private etcd.

The test process stands in for the agents: it tells the job which worker died. Everything else is what a real
worker runs, ``runtime.main.supervised`` included.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.coordination import JobCoordinator, JobFailure
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.server import PrivateEtcd, free_port
from deepspeed_bamboo.protocol import EXIT_DRAINED
from deepspeed_bamboo.testing.fork_server import ForkedProcess, ForkRequest, ForkServer, reference

Body = Callable[..., Any]
AWAITED = "awaited"
"""The file in a job's directory that a worker writes when it waits for workers to join."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended: exit codes and what the bodies returned, both by first rank; output for messages."""

    codes: list[int | None]
    values: dict[int, Any]
    outputs: dict[int, str]

    @property
    def survivors(self) -> list[int]:
        """The ranks whose body returned."""
        return sorted(self.values)

    def common(self, key: str) -> Any:
        """The value of ``key``, which all survivors must have returned alike."""
        values = [json.dumps(self.values[rank][key], sort_keys=True) for rank in self.survivors]
        assert values, f"no worker finished: codes {self.codes}\n{self.transcript()}"
        assert len(set(values)) == 1, f"workers returned different {key}: {values}"
        return self.values[self.survivors[0]][key]

    def transcript(self) -> str:
        """The end of everybody's output."""
        return "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in self.outputs.items())


class _Worker:
    """A worker's process: ``_work(*arguments)`` in a fork of ``server``."""

    def __init__(self, server: ForkServer, *arguments: Any) -> None:
        self._server, self._arguments = server, arguments
        self._process: ForkedProcess | None = None

    def start(self) -> None:
        pickled = base64.b64encode(pickle.dumps(self._arguments)).decode()
        self._process = self._server.fork(ForkRequest(reference(_begin), arguments=(pickled,)))

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return None if self._process is None else self._process.exit_code(within_seconds=0)

    def kill(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
            self._process.exit_code(within_seconds=10)


class Jobs:
    """Runs jobs one after another under ``directory``, over one etcd."""

    def __init__(self, directory: Path, etcd: PrivateEtcd, server: ForkServer) -> None:
        self.directory = directory
        self._etcd = etcd
        self._count = 0
        self._server = server

    @property
    def etcd_socket(self) -> str:
        """Where the etcd that the jobs use listens."""
        return self._etcd.endpoint.host

    @property
    def etcd_pid(self) -> int:
        """The process of the etcd that the jobs use."""
        return self._etcd.pid

    def run(
        self,
        body: Body,
        *,
        world: int,
        joining: int = 0,
        joining_after_deaths: int = 0,
        sites: Sequence[str] = (),
        together: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 120.0,
        **arguments: Any,
    ) -> JobResult:
        """Call ``body(**arguments)`` in ``world`` workers. Fails when one is still running after the time-out.

        ``environment`` is added to that of each.
        ``sites`` has a "node/zone" for each; without it all are on one node in one zone.
        ``together`` are ranks that go at once: when one of them has died, the others are killed before the job is told.
        ``joining`` more workers come as soon as the job has its first epoch and ``joining_after_deaths`` workers have
        died, as those of further agents would. However fast they start they are not taken in before that.
        Where the body is given ``waits``, they come when a worker waits for them (:data:`AWAITED`): at a known step.
        """
        self._count += 1
        directory = self.directory / f"job{self._count}"
        directory.mkdir()
        environment = {
            **(environment or {}),
            "BAMBOO_JOB": f"job{self._count}",
            "BAMBOO_ENDPOINTS": str(self._etcd.endpoint),
            "BAMBOO_PREFIX": "/tests",
            "BAMBOO_SECRET": "of these tests",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "TEST_DIRECTORY": str(directory),
        }
        where = [dict(zip(("BAMBOO_NODE", "BAMBOO_ZONE"), site.split("/"), strict=True)) for site in sites]
        where += [{} for _ in range(world + joining - len(sites))]
        processes = [
            _Worker(self._server, rank, {**environment, **where[rank]}, directory, body, arguments)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        late = [
            _Worker(
                self._server, rank, {**environment, **where[rank], "BAMBOO_JOINING": "1"}, directory, body, arguments
            )
            for rank in range(world, world + joining)
        ]
        awaited = [directory / AWAITED] if arguments.get("waits") else []
        self._watch(
            processes,
            late,
            directory,
            after_deaths=joining_after_deaths,
            after_files=awaited,
            together=together,
            timeout_seconds=timeout_seconds,
        )
        stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            if process.exitcode is None:
                process.kill()
        result = _collect(directory, [process.exitcode for process in processes])
        assert not stuck, f"ranks {stuck} still ran after {timeout_seconds:.0f} s\n{result.transcript()}"
        return result

    def _watch(
        self,
        processes: list[_Worker],
        late: Sequence[_Worker],
        directory: Path,
        *,
        after_deaths: int,
        after_files: Sequence[Path],
        together: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        """What agents do: tell the job who died, and why it fails, until all processes have ended.

        Those of ``late`` start, and are added to ``processes``, when there is something to join, enough are dead, and
        all of ``after_files`` are there.
        """
        store = EtcdStore([self._etcd.endpoint])
        deadline = time.monotonic() + timeout_seconds
        running, deaths = dict(enumerate(processes)), 0
        while running and time.monotonic() < deadline:
            ready = deaths >= after_deaths and all(path.exists() for path in after_files)
            if late and ready and self._has_epoch(store, directory):
                for process in late:
                    running[len(processes)] = process
                    processes.append(process)
                    process.start()
                late = []
            if any(processes[rank].exitcode is not None for rank in together):
                for rank in together:
                    processes[rank].kill()
            for rank, process in list(running.items()):
                if process.exitcode is not None:
                    del running[rank]
                    deaths += 1
                    if process.exitcode and process.exitcode != EXIT_DRAINED:
                        self._tell(store, directory, rank=rank, code=process.exitcode)
            time.sleep(0.02)
        store.close()

    @staticmethod
    def _has_epoch(store: EtcdStore, directory: Path) -> bool:
        name = directory / "job"
        if not name.exists():
            return False
        return JobCoordinator(store, job=name.read_text(encoding="utf-8"), prefix="/tests").epoch() is not None

    def _tell(self, store: EtcdStore, directory: Path, *, rank: int, code: int) -> None:
        name = directory / "job"
        if not name.exists():
            return
        coordinator = JobCoordinator(store, job=name.read_text(encoding="utf-8"), prefix="/tests")
        worker = f"w{rank}"
        if code > 0:
            coordinator.fail(JobFailure(worker=worker, kind="user_error", message=f"exit code {code}", traceback=""))
        elif coordinator.epoch() is not None:
            coordinator.propose_loss([worker], reason=f"signal {-code}", proposer="test")
            coordinator.withdraw(worker)


@contextmanager
def jobs_in(directory: Path, server: ForkServer) -> Iterator[Jobs]:
    """Runs jobs with a private etcd for as long as the block lasts."""
    with PrivateEtcd() as etcd:
        yield Jobs(directory, etcd, server)


def _begin(pickled: str) -> None:
    _work(*pickle.loads(base64.b64decode(pickled)))


def _work(rank: int, environment: Mapping[str, str], directory: Path, body: Body, arguments: Mapping[str, Any]) -> None:
    import faulthandler

    from deepspeed_bamboo.models import half_precision
    from deepspeed_bamboo.runtime.main import supervised

    if environment.get("BAMBOO_JOINING"):
        environment = {**environment, "BAMBOO_JOB": (directory / "job").read_text(encoding="utf-8")}
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), BAMBOO_WORKER=f"w{rank}")
    half_precision.allow_on_cpus()
    # Helpers of data loaders must notice that their worker is gone: children of a fork server would not.
    multiprocessing.set_start_method("fork", force=True)
    output = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(60.0, exit=False)

    def run() -> None:
        value = body(**arguments)
        partial = directory / f"value{rank}.partial"
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.rename(directory / f"value{rank}")

    code = supervised(run)
    sys.stdout.flush()
    os._exit(code)


def _collect(directory: Path, codes: list[int | None]) -> JobResult:
    ranks = range(len(codes))
    values = {rank: directory / f"value{rank}" for rank in ranks}
    return JobResult(
        codes,
        {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in values.items() if path.exists()},
        {rank: (directory / f"output{rank}").read_text(encoding="utf-8", errors="replace") for rank in ranks},
    )
