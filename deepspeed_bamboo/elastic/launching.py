"""From a slot's command line to a running agent, or to the plain script where the plugin is off."""

from __future__ import annotations

import os
import secrets
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
from deepspeed_bamboo.elastic.boot import Boot, Exchange
from deepspeed_bamboo.elastic.command_line import CommandLine, parse_command_line
from deepspeed_bamboo.elastic.errors import LaunchError
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
_CALL_SECONDS = 1.0
# The launcher ends all slots when one fails, so those with nothing to say leave that to the one that speaks.
_SILENT_SLOTS_WAIT_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one slot. Returns the exit code of its process; does not return when the plugin is off."""
    line = parse_command_line(sys.argv[1:] if arguments is None else arguments)
    speaks = True
    try:
        local_rank = _first_number(line.local_rank, os.environ.get("LOCAL_RANK"))
        speaks = local_rank == 0
        if not Path(line.script).is_file():
            raise LaunchError(f"script {line.script!r} is no file in {Path.cwd()}; check the path")
        source = find_source(bamboo_config=line.bamboo_config, arguments=line.arguments)
        config = None if source is None else load_section(source)
        if config is None or not config.enabled:
            return run_plain(line)
        slot = slot_from_environment(os.environ, local_rank=line.local_rank, zone=config.topology.zones)
        return run_slot(slot, line, config)
    except BambooError as error:
        if speaks:
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
        # Imports torch, which takes a second, while rank 0 starts the coordinator.
        import deepspeed_bamboo.elastic.agent  # noqa: F401

        boot = exchange.take(within_seconds=_BOOT_SECONDS)
        store = _open(boot.endpoints, config)
        return _be_agent(slot, boot, line, config, store=store, launchers=launchers)
    finally:
        if slot.rank == 0:
            exchange.close()


def _lead(
    slot: Slot, line: CommandLine, config: BambooConfig, *, exchange: Exchange, launchers: tuple[int, ...]
) -> int:
    """As rank 0: provide the coordinator, tell the others, be an agent like them; end the coordinator last."""
    server: PrivateEtcd | None = None
    try:
        try:
            endpoints = tuple(config.coordinator.endpoints)
            if not endpoints:
                server = PrivateEtcd(listen_host=_listen_host(slot))
                endpoints = (str(_reachable(server.endpoint, slot)),)
            boot = Boot(
                job=line.job or _job_name(line.script),
                prefix=config.coordinator.prefix,
                endpoints=endpoints,
                master_addr=slot.master_addr,
                master_ports=tuple(free_ports("", count=MAX_RESTARTS + 1)),
            )
            store = _open(endpoints, config)
            JobCoordinator(store, job=boot.job, prefix=boot.prefix).claim_name()
            exchange.give(boot)
        except BambooError:
            exchange.refuse()
            raise
        return _be_agent(
            slot, boot, line, config, store=store, launchers=launchers, hosts=server is not None, exchange=exchange
        )
    finally:
        if server is not None:
            server.stop()


def _be_agent(
    slot: Slot,
    boot: Boot,
    line: CommandLine,
    config: BambooConfig,
    *,
    store: EtcdStore,
    launchers: tuple[int, ...],
    hosts: bool = False,
    exchange: Exchange | None = None,
) -> int:
    from deepspeed_bamboo.elastic.agent import AgentSettings, BambooElasticAgent
    from deepspeed_bamboo.elastic.starting import CommandStarter

    agent = BambooElasticAgent(
        slot,
        boot,
        coordinator=JobCoordinator(store, job=boot.job, prefix=boot.prefix),
        starter=CommandStarter(WORKER_MODULE, ["--", *line.script_line]),
        settings=AgentSettings(
            lease_seconds=config.coordinator.lease_seconds, hosts_coordinator=hosts, launchers=launchers
        ),
        on_all_present=exchange.close if exchange is not None else (lambda: None),
    )
    try:
        agent.run()
    except CoordinationError as error:
        raise LaunchError(f"the agent of rank {slot.rank} lost its coordinator: {error}") from error
    finally:
        store.close()
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


def _first_number(passed: int | None, variable: str | None) -> int:
    if passed is not None:
        return passed
    return int(variable) if variable is not None and variable.isdigit() else 0
