"""From a slot's command line to a running agent, or to the plain script where the plugin is off."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepspeed_bamboo.config import BambooConfig
from deepspeed_bamboo.coordination import CoordinationError, JobCoordinator, parse_endpoints
from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.server import PrivateEtcd, free_ports
from deepspeed_bamboo.elastic.agent_settings import AgentHooks, AgentSettings
from deepspeed_bamboo.elastic.boot import Boot, Exchange
from deepspeed_bamboo.elastic.command_line import CommandLine, parse_command_line
from deepspeed_bamboo.elastic.errors import LaunchError, RefusedError
from deepspeed_bamboo.elastic.exchange_file import FileExchange
from deepspeed_bamboo.elastic.exchange_socket import SocketExchange
from deepspeed_bamboo.elastic.processes import launcher_chain
from deepspeed_bamboo.elastic.settings_source import find_source, load_section
from deepspeed_bamboo.elastic.slot import Slot, key_part, slot_from_environment
from deepspeed_bamboo.elastic.supervisor import MAX_RESTARTS
from deepspeed_bamboo.errors import BambooError

WORKER_MODULE = "deepspeed_bamboo.runtime.main"

EXIT_CANNOT_START = 2
_BOOT_SECONDS = 120.0
_CLAIM_SECONDS = 60.0
_CALL_SECONDS = 1.0
# The launcher ends all slots when one fails, so those with nothing to say leave that to the one that speaks.
_SILENT_SLOTS_WAIT_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one slot. Returns the exit code of its process; does not return when the plugin is off."""
    line = parse_command_line(sys.argv[1:] if arguments is None else arguments)
    _clean_up_when_told_to_end()
    # All slots of a machine would say the same about the command line and the settings.
    speaks = _first_number(line.local_rank, os.environ.get("LOCAL_RANK")) == 0
    try:
        if not Path(line.script).is_file():
            raise LaunchError(f"script {line.script!r} is no file in {Path.cwd()}; check the path")
        source = find_source(bamboo_config=line.bamboo_config, arguments=line.arguments)
        config = None if source is None else load_section(source)
        if config is None or not config.enabled:
            return run_plain(line)
        slot = slot_from_environment(os.environ, local_rank=line.local_rank, zone=config.topology.zones)
        speaks = True
        return run_slot(slot, line, config)
    except BambooError as error:
        if speaks and not isinstance(error, RefusedError):
            print(f"deepspeed_bamboo cannot start: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SILENT_SLOTS_WAIT_SECONDS)
        return EXIT_CANNOT_START


def run_plain(line: CommandLine) -> int:
    """Become the script, in this very process, as if the launcher had started it. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *line.script_line])
    return 0


def run_slot(slot: Slot, line: CommandLine, config: BambooConfig) -> int:
    """Find the job's coordinator, or start it, and be this slot's agent until the job is over."""
    launchers = launcher_chain()
    exchange: Exchange
    if slot.one_machine:
        exchange = FileExchange(launchers[0])
    else:
        exchange = SocketExchange(
            address=slot.master_addr, port=slot.master_port, world_size=slot.world_size, rank=slot.rank
        )
    try:
        if slot.rank == 0:
            return _lead(slot, line, config, exchange=exchange, launchers=launchers)
        return _follow(slot, line, config, exchange=exchange, launchers=launchers)
    finally:
        if slot.rank == 0:
            exchange.close()


def _lead(
    slot: Slot, line: CommandLine, config: BambooConfig, *, exchange: Exchange, launchers: tuple[int, ...]
) -> int:
    """As rank 0: provide the coordinator, tell the others, be an agent like them; end the coordinator last."""
    with contextlib.ExitStack() as until_the_end, contextlib.ExitStack() as until_registered:
        try:
            endpoints = tuple(config.coordinator.endpoints)
            hosts = not endpoints
            if hosts:
                server = until_the_end.enter_context(PrivateEtcd(listen_host=_listen_host(slot)))
                endpoints = (str(_reachable(server.endpoint, slot)),)
            boot = Boot(
                job=line.job or _job_name(line.script),
                prefix=config.coordinator.prefix,
                endpoints=endpoints,
                master_addr=slot.master_addr,
                master_ports=tuple(free_ports("", count=MAX_RESTARTS + 1)),
                host_pid=os.getpid() if hosts else 0,
            )
            store = until_the_end.enter_context(contextlib.closing(_open(endpoints, config)))
            coordinator = JobCoordinator(store, job=boot.job, prefix=boot.prefix)
            until_registered.enter_context(coordinator.claim_name(lease_seconds=_CLAIM_SECONDS))
            exchange.give(boot)
        except BambooError:
            exchange.refuse()
            raise
        settings = AgentSettings(config.coordinator.lease_seconds, hosts_coordinator=hosts, launchers=launchers)
        hooks = AgentHooks(on_registered=until_registered.close, on_all_present=exchange.close)
        return _be_agent(slot, boot, line, coordinator=coordinator, settings=settings, hooks=hooks)


def _follow(
    slot: Slot, line: CommandLine, config: BambooConfig, *, exchange: Exchange, launchers: tuple[int, ...]
) -> int:
    """As any other rank: learn where the coordinator is, and be an agent."""
    # Imports torch, which takes a second, while rank 0 starts the coordinator.
    import deepspeed_bamboo.elastic.agent  # noqa: F401

    boot = exchange.take(within_seconds=_BOOT_SECONDS)
    with contextlib.closing(_open(boot.endpoints, config)) as store:
        coordinator = JobCoordinator(store, job=boot.job, prefix=boot.prefix)
        settings = AgentSettings(config.coordinator.lease_seconds, launchers=launchers)
        return _be_agent(slot, boot, line, coordinator=coordinator, settings=settings, hooks=AgentHooks())


def _be_agent(
    slot: Slot,
    boot: Boot,
    line: CommandLine,
    *,
    coordinator: JobCoordinator,
    settings: AgentSettings,
    hooks: AgentHooks,
) -> int:
    from deepspeed_bamboo.elastic.agent import BambooElasticAgent
    from deepspeed_bamboo.elastic.starting import CommandStarter

    starter = CommandStarter(WORKER_MODULE, ["--", *line.script_line])
    agent = BambooElasticAgent(slot, boot, coordinator=coordinator, starter=starter, settings=settings, hooks=hooks)
    try:
        agent.run()
    except CoordinationError as error:
        raise LaunchError(f"the agent of rank {slot.rank} lost its coordinator: {error}") from error
    return agent.exit_code


def _open(endpoints: Sequence[str], config: BambooConfig) -> EtcdStore:
    """A store that answers. Raises CoordinatorUnavailable naming the endpoints and how long they were tried."""
    store = EtcdStore(parse_endpoints(endpoints), call_timeout_seconds=_CALL_SECONDS, attempt_timeout_seconds=0.5)
    store.ping(within_seconds=config.coordinator.connect_timeout_seconds)
    return store


def _listen_host(slot: Slot) -> str:
    """Loopback if nobody else must reach it; else the master address, or all if that is no real one here."""
    if slot.one_machine:
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(slot.master_addr)
    except OSError as error:
        raise LaunchError(
            f"master address {slot.master_addr!r} cannot be resolved ({error}); check the launcher's --master_addr"
        ) from error
    return "0.0.0.0" if address.startswith("127.") else address


def _reachable(endpoint: Endpoint, slot: Slot) -> Endpoint:
    """Where the other slots find what listens at ``endpoint``."""
    return endpoint if slot.one_machine else Endpoint(slot.master_addr, endpoint.port)


def _job_name(script: str) -> str:
    return f"{key_part(Path(script).stem)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _clean_up_when_told_to_end() -> None:
    """Until the agent hears signals: leave by SystemExit, so that what was started so far is removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def _first_number(passed: int | None, variable: str | None) -> int:
    if passed is not None:
        return passed
    return int(variable) if variable is not None and variable.isdigit() else 0
