"""One simulated machine: agents and workers as forks, for tests and fault sweeps. A run takes milliseconds to start.

    with ForkServer(PRELOAD) as server:
        with Machine(server, worker_main, workers=4) as machine:
            machine.kill_worker(2)
            outcome = machine.wait(within_seconds=60)

``worker_main(argv)`` is a function at the top level of an importable module; what it returns or raises
ends its worker as a script's end or exception would.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed_bamboo.config.section import NoticesConfig
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator, parse_endpoints
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.server import PrivateEtcd, free_ports
from deepspeed_bamboo.elastic.agent_settings import AgentSettings
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.elastic.hang_watch import HangRules
from deepspeed_bamboo.elastic.leftovers import signal_session
from deepspeed_bamboo.elastic.notices import NoticePlan, look_around, notice_plan
from deepspeed_bamboo.elastic.rules import MAX_RESTARTS, Entry, Rules
from deepspeed_bamboo.elastic.slot import Slot, key_part
from deepspeed_bamboo.testing.fork_server import ForkedProcess, ForkRequest, ForkServer, reference
from deepspeed_bamboo.trust.secret import new_secret

# What agents and workers need, by name: this part of the package does not import deepspeed.
PRELOAD = (
    "deepspeed",
    "deepspeed_bamboo.coordination",
    "deepspeed_bamboo.elastic.agent",
    "deepspeed_bamboo.elastic.bootstrap",
    "deepspeed_bamboo.testing.forked_worker",
    "deepspeed_bamboo.testing.harness",
)

WorkerMain = Callable[[list[str]], Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: agents' exit codes (None: still running at the time limit) and what each slot printed."""

    exit_codes: dict[int, int | None]
    outputs: dict[int, str]
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether some agent had not ended in time."""
        return None in self.exit_codes.values()

    @property
    def output(self) -> str:
        """All that was printed, slot by slot."""
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in self.outputs.items())


class Machine:
    """Slots of one machine with their agents. Leaving the ``with`` block ends whatever still runs."""

    def __init__(
        self,
        server: ForkServer,
        worker_main: WorkerMain,
        *,
        workers: int = 4,
        argv: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        endpoints: Sequence[str] = (),
        job: str | None = None,
        lease_seconds: float = 3.0,
        nodes: Sequence[str] = (),
        zones: Sequence[str] = (),
        start_workers: int | None = None,
        max_restarts: int = 0,
        restart_seconds: float = 0.1,
        expulsion_seconds: float = 10.0,
        notices: Mapping[str, Mapping[str, Any]] | None = None,
        hangs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start. ``environment`` is added to that of agents and workers; without ``endpoints`` an etcd is started.

        Give the same ``endpoints`` and no ``job`` to many machines, one after the other, to save that time.
        ``nodes``, ``zones``: of each slot, for a job as of several machines. Slots from
        ``start_workers`` on are standbys. ``notices``: the section of that name, by node. ``hangs``: that section.
        """
        self.job = job or f"run-{os.getpid()}-{time.monotonic_ns()}"
        self._workers = workers
        self._etcd = None if endpoints else PrivateEtcd()
        self.endpoints = tuple(endpoints) if self._etcd is None else (str(self._etcd.endpoint),)
        self._folder = Path(tempfile.mkdtemp(prefix="bamboo-machine-"))
        self._store: EtcdStore | None = None
        self._agents: dict[int, ForkedProcess] = {}
        self._started = time.monotonic()
        self._rules = Rules(
            max_restarts=max_restarts, restart_seconds=restart_seconds, expulsion_seconds=expulsion_seconds
        )
        self._start_workers = start_workers
        self._nodes, self._notices, self._hangs = list(nodes), dict(notices or {}), dict(hangs or {})
        self._server, self._lease_seconds = server, lease_seconds
        self._worker_main, self._argv, self._environment = worker_main, list(argv), dict(environment or {})
        self._boot = _boot(self.job, self.endpoints)
        try:
            self._start(zones)
        except BaseException:
            self.close()
            raise

    def _start(self, zones: Sequence[str]) -> None:
        for rank in range(self._workers):
            standby = self._start_workers is not None and rank >= self._start_workers
            node = self._nodes[rank] if self._nodes else ""
            zone = zones[rank] if zones else "unknown"
            self._add(rank, node=node, zone=zone, entry=Entry.STANDBY if standby else Entry.START)

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def etcd(self) -> PrivateEtcd:
        """The machine's own etcd. Raises LaunchError when it was given endpoints."""
        if self._etcd is None:
            raise LaunchError("this machine uses the endpoints it was given and has no etcd of its own")
        return self._etcd

    @property
    def coordinator(self) -> JobCoordinator:
        """A coordinator of the job, for looking at it."""
        if self._store is None:
            self._store = EtcdStore(parse_endpoints(self.endpoints))
        return JobCoordinator(self._store, job=self.job)

    @property
    def agent_pids(self) -> dict[int, int]:
        """The agents' processes by rank."""
        return {rank: agent.pid for rank, agent in self._agents.items()}

    def join(
        self,
        *,
        node: str = "",
        zone: str = "unknown",
        environment: Mapping[str, str] | None = None,
        notices: Mapping[str, Any] | None = None,
    ) -> int:
        """Start one more agent, as a command that joins the running job would; returns its rank."""
        coordinator = self.coordinator
        if notices is not None:
            self._notices[node] = notices
        coordinator.reserve_ranks(self._workers)
        rank = coordinator.next_rank()
        self._add(rank, node=node, zone=zone, entry=Entry.JOIN, environment=environment or {})
        return rank

    def worker_pid(self, rank: int, *, generation: int = 0, within_seconds: float = 30.0) -> int:
        """The process of a rank's worker, once it is started. Raises LaunchError when it is not in time."""
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline:
            pids = self._worker_pids(rank)
            if len(pids) > generation:
                return pids[generation]
            time.sleep(0.002)
        raise LaunchError(f"rank {rank} has no worker of generation {generation}:\n{self.output(rank)}")

    def kill_worker(self, rank: int, number: int = signal.SIGKILL, *, generation: int = 0) -> float:
        """Send ``number`` to a rank's worker; returns the time (monotonic) just before.

        ``generation``: how many workers of this rank came before that one, for whatever reason.
        """
        pid = self.worker_pid(rank, generation=generation)
        now = time.monotonic()
        os.kill(pid, number)
        return now

    def signal_agent(self, rank: int, number: int) -> None:
        """Send ``number`` to a rank's agent."""
        self._agents[rank].signal(number)

    def take(self, rank: int) -> None:
        """Kill a rank's agent and its worker at once, as if their machine had gone; nothing where they have ended."""
        if self._agents[rank].exit_code(within_seconds=0.0) is not None:
            return
        self.signal_agent(rank, signal.SIGKILL)
        for pid in self._worker_pids(rank)[-1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def output(self, rank: int) -> str:
        """What agent and worker of a rank have printed so far."""
        file = self._output(rank)
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def wait(self, *, within_seconds: float) -> Outcome:
        """Wait for all agents to end, for no longer than that; then look."""
        deadline = time.monotonic() + within_seconds
        codes = {
            rank: agent.exit_code(within_seconds=max(0.0, deadline - time.monotonic()))
            for rank, agent in self._agents.items()
        }
        seconds = time.monotonic() - self._started
        return Outcome(codes, {rank: self.output(rank) for rank in self._agents}, seconds)

    def close(self) -> None:
        """Kill what still runs and remove what was made."""
        for agent in self._agents.values():
            agent.abandon()
        for rank in self._agents:
            for pid in self._worker_pids(rank):
                signal_session(pid, signal.SIGKILL)
        if self._store is not None:
            self._remove_keys(self._store)
            self._store.close()
            self._store = None
        if self._etcd is not None:
            self._etcd.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remove_keys(self, store: EtcdStore) -> None:
        try:
            JobCoordinator(store, job=self.job).clean_up()
        except CoordinatorUnavailable:
            return  # the test has ended the server

    def _add(
        self, rank: int, *, node: str, zone: str, entry: Entry, environment: Mapping[str, str] | None = None
    ) -> None:
        plan = self._plan(rank, node=node or key_part(socket.gethostname()), zone=zone, entry=entry)
        plan["environment"] = {**self._environment, **(environment or {})}
        self._agents[rank] = self._server.fork(
            ForkRequest(
                target=reference(agent_main),
                arguments=(plan,),
                environment=plan["environment"],
                output=str(self._output(rank)),
            )
        )

    def _plan(self, rank: int, *, node: str, zone: str, entry: Entry) -> dict[str, Any]:
        own_command = entry is Entry.JOIN
        size = 1 if own_command else self._workers
        slot = Slot(
            rank=rank,
            local_rank=0 if own_command else self._local_rank(rank),
            world_size=size,
            local_world_size=size,
            node=node,
            zone=zone,
            master_addr=self._boot.master_addr,
            master_port=self._boot.master_ports[0],
            start_workers=None if own_command else self._start_workers,
        )
        return {
            "slot": vars(slot),
            "boot": replace(self._boot, ranks=(rank,) if own_command else ()).to_json(),
            "server": self._server.address,
            "target": reference(self._worker_main),
            "argv": self._argv,
            "output": str(self._output(rank)),
            "pid_file": str(self._pid_file(rank)),
            "lease_seconds": self._lease_seconds,
            "launcher": os.getpid(),
            "notices": self._notices.get(node),
            "rules": {
                "entry": entry.value,
                "max_restarts": self._rules.max_restarts,
                "restart_seconds": self._rules.restart_seconds,
                "expulsion_seconds": self._rules.expulsion_seconds,
            },
            "hangs": self._hangs,
        }

    def _local_rank(self, rank: int) -> int:
        """By node, if there are several."""
        return self._nodes[:rank].count(self._nodes[rank]) if self._nodes else rank

    def _worker_pids(self, rank: int) -> list[int]:
        """Of all attempts so far."""
        file = self._pid_file(rank)
        return [int(line) for line in file.read_text(encoding="utf-8").split()] if file.exists() else []

    def _output(self, rank: int) -> Path:
        return self._folder / f"output-{rank}"

    def _pid_file(self, rank: int) -> Path:
        return self._folder / f"pids-{rank}"


def _boot(job: str, endpoints: tuple[str, ...]) -> Boot:
    return Boot(
        job=job,
        prefix="/deepspeed_bamboo",
        endpoints=endpoints,
        master_addr="127.0.0.1",
        master_ports=tuple(free_ports("127.0.0.1", count=MAX_RESTARTS + 1)),
        secret=new_secret(),
    )


def agent_main(plan: dict[str, Any]) -> int:
    """In an agent's process: be the agent that ``plan`` describes. Returns its exit code."""
    from deepspeed_bamboo.elastic.agent import BambooElasticAgent
    from deepspeed_bamboo.testing.forked_worker import ForkStarter

    boot = Boot.from_json(plan["boot"])
    store = EtcdStore(parse_endpoints(boot.endpoints), call_timeout_seconds=1.0, attempt_timeout_seconds=0.5)
    agent = BambooElasticAgent(
        Slot(**plan["slot"]),
        boot,
        coordinator=JobCoordinator(store, job=boot.job, prefix=boot.prefix),
        starter=ForkStarter(
            plan["server"],
            target=plan["target"],
            arguments=plan["argv"],
            output=plan["output"],
            pid_file=plan["pid_file"],
            inherited=plan["environment"],
        ),
        settings=AgentSettings(
            lease_seconds=plan["lease_seconds"],
            launchers=(plan["launcher"],),
            rules=Rules(**{**plan["rules"], "entry": Entry(plan["rules"]["entry"])}, hangs=HangRules(**plan["hangs"])),
            notices=_notice_plan(plan["notices"]),
        ),
    )
    try:
        agent.run()
    finally:
        store.close()
    return agent.exit_code


def _notice_plan(section: dict[str, Any] | None) -> NoticePlan | None:
    if section is None:
        return None
    notices = NoticesConfig(**section)
    return notice_plan(notices, look_around(notices, zones="auto", environment=os.environ))
