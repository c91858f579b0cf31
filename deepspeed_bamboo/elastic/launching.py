"""From a slot's command line to a running agent, or to the plain script where the plugin is off."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import CoordinationError, EtcdGuard, JobCoordinator
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.published import PublishedJob, own_pid_namespace, publish
from deepspeed_bamboo.coordination.server import free_ports
from deepspeed_bamboo.elastic.address import advertised_address, check_own_address, listening_address
from deepspeed_bamboo.elastic.agent_settings import AgentHooks, AgentSettings
from deepspeed_bamboo.elastic.boot import Boot, Exchange
from deepspeed_bamboo.elastic.cleaning_up import cleaning_up_when_told_to_end
from deepspeed_bamboo.elastic.command_line import CommandLine, parse_command_line
from deepspeed_bamboo.elastic.errors import ExchangeError, JobOverError, LateError, LaunchError, RefusedError
from deepspeed_bamboo.elastic.exchange_file import FileExchange
from deepspeed_bamboo.elastic.exchange_socket import SocketExchange
from deepspeed_bamboo.elastic.finding import check_fleet, find_running, patience_of
from deepspeed_bamboo.elastic.greeting import greeting
from deepspeed_bamboo.elastic.grid_told import grid_environment, told_pipelines
from deepspeed_bamboo.elastic.hang_watch import HangRules
from deepspeed_bamboo.elastic.job_secrets import secret_to_start
from deepspeed_bamboo.elastic.notices import NoticePlan, look_around, notice_plan
from deepspeed_bamboo.elastic.outcome import BEGUN, PLAIN, OutcomeNote, SlotNote
from deepspeed_bamboo.elastic.own_etcd import reached, start_own_etcd
from deepspeed_bamboo.elastic.processes import launcher_chain, outlived_its_launcher
from deepspeed_bamboo.elastic.refusing import EXIT_CODES, how_refused
from deepspeed_bamboo.elastic.rules import MAX_RESTARTS, Entry, Rules
from deepspeed_bamboo.elastic.running_job import RunningJob, open_store
from deepspeed_bamboo.elastic.schedulers import ranks_of_scheduler
from deepspeed_bamboo.elastic.settings_source import find_section
from deepspeed_bamboo.elastic.slot import Slot, key_part, slot_from_environment
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.eventlog.log import check_directory
from deepspeed_bamboo.news import tell
from deepspeed_bamboo.protocol import (
    BY_IMPORT,
    CONFIG,
    ENDPOINTS,
    FLEET,
    OTHER_ENGINES,
    OUTCOME,
    RUN_PLAIN,
    START_DIRECTORY,
)
from deepspeed_bamboo.trust.secret import proof_of

WORKER_MODULE = "deepspeed_bamboo.runtime.main"

_UNPROTECTED = "so this is plain DeepSpeed, which survives no losses"
_SHOWN_CHARACTERS = 200  # longer is base64 and no path
_BOOT_SECONDS = 120.0
_CLAIM_SECONDS = 60.0
_COMPACT_SECONDS = 3600.0
# The launcher ends all slots when one fails, so those with nothing to say leave that to the one that speaks.
_SILENT_SLOTS_WAIT_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one slot. Returns the exit code of its process; does not return when the plugin is off."""
    line = parse_command_line(sys.argv[1:] if arguments is None else arguments)
    with cleaning_up_when_told_to_end():
        return _run(line)


def _run(line: CommandLine) -> int:
    note = OutcomeNote(os.environ)
    note.write(SlotNote(BEGUN))
    # All slots of a machine would say the same about the command line and the settings.
    speaks = first = _first_number(line.local_rank, os.environ.get("LOCAL_RANK")) == 0
    try:
        if not Path(line.script).is_file():
            raise LaunchError(f"script {line.script!r} is no file in {Path.cwd()}; check the path")
        os.environ.update(ranks_of_scheduler(os.environ))
        config, source = find_section(line, os.environ)
        if config is None and speaks:
            print(f"deepspeed_bamboo: {_why_unprotected(source)}", file=sys.stderr, flush=True)
        if config is None or not config.enabled:
            return run_plain(line, watched=config is None)
        slot = slot_from_environment(os.environ, local_rank=line.local_rank, zone=config.topology.zones)
        slot = replace(slot, start_workers=_start_workers(line.workers, slot.world_size))
        check_own_address(os.environ)
        check_fleet(line, config, os.environ, one_machine=slot.one_machine)
        surroundings = look_around(config.notices, zones=config.topology.zones, environment=os.environ)
        slot = replace(slot, zone=surroundings.identity.zone)
        EtcdGuard.of(config.coordinator).check(os.environ)
        if config.event_log is not None:
            check_directory(config.event_log)
        speaks = True
        return run_slot(slot, line, config, notices=notice_plan(config.notices, surroundings))
    except BambooError as error:
        how = how_refused(error)
        if speaks and not isinstance(error, RefusedError):
            what = "deepspeed_bamboo" if isinstance(error, JobOverError) else "deepspeed_bamboo cannot start"
            print(f"{what}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SILENT_SLOTS_WAIT_SECONDS)
        silent = isinstance(error, RefusedError) and not first
        note.write(SlotNote(how, EXIT_CODES[how], message="" if silent else str(error)))
        return EXIT_CODES[how]


def _why_unprotected(source: str | None) -> str:
    """Why the plugin is off though its launcher was used, and how to turn it on."""
    if source is None:
        return (
            f"no configuration is named here, {_UNPROTECTED}. If the script finds its configuration by itself and that "
            'has a "bamboo" section, name it: --bamboo_config FILE SCRIPT ...'
        )
    name = source if len(source) <= _SHOWN_CHARACTERS else "the configuration"
    return (
        f'{name} has no "bamboo" section, {_UNPROTECTED}. "bamboo": {{}} in it turns the plugin on; '
        '"bamboo": {"enabled": false} turns it off without this line'
    )


def run_plain(line: CommandLine, *, watched: bool) -> int:
    """Become the script, as if the launcher had started it; ``watched``: see plain_script.py. Does not return."""
    OutcomeNote(os.environ).write(SlotNote(PLAIN))
    os.environ.pop(OUTCOME, None)
    if os.environ.pop(BY_IMPORT, None):
        os.environ[RUN_PLAIN] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    runner = ["-m", "deepspeed_bamboo.elastic.plain_script"] if watched else []
    os.execv(sys.executable, [sys.executable, "-u", *runner, *line.script_line])
    return 0


def run_slot(slot: Slot, line: CommandLine, config: BambooConfig, *, notices: NoticePlan | None = None) -> int:
    """Find the job's coordinator, or start it, and be this slot's agent until the job is over."""
    if outlived_its_launcher(os.environ):
        raise LateError("the launcher ended before its slots had started, so nothing is started")
    command = _Command(slot, line, config, launcher_chain(), notices)
    exchange: Exchange
    if slot.one_machine:
        exchange = FileExchange(command.launchers[0])
    else:
        exchange = SocketExchange(
            address=slot.master_addr,
            port=slot.master_port,
            world_size=slot.world_size,
            rank=slot.rank,
            tell=tell if slot.local_rank == 0 else _say_nothing,
        )
    try:
        return _lead(command, exchange) if slot.rank == 0 else _follow(command, exchange)
    finally:
        if slot.rank == 0:
            exchange.close()


@dataclass(frozen=True)
class _Command:
    """One slot of the command that was given: which it is, what it says, who started it."""

    slot: Slot
    line: CommandLine
    config: BambooConfig
    launchers: tuple[int, ...]
    notices: NoticePlan | None

    def settings(self, boot: Boot, reached: tuple[str, ...]) -> AgentSettings:
        """What this slot's agent has to know. ``reached``: where its worker finds the coordinator."""
        settings = _settings(_placed(self.slot, boot), boot, self.config)
        settings = replace(settings, environment=(*settings.environment, (ENDPOINTS, ",".join(reached))))
        return replace(settings, launchers=self.launchers, notices=self.notices)


def _lead(command: _Command, exchange: Exchange) -> int:
    """As rank 0: find or start the job, tell the others of this command, be an agent like them.

    Whoever started the job's own etcd ends it last.
    """
    slot, line, config = command.slot, command.line, command.config
    with contextlib.ExitStack() as until_the_end, contextlib.ExitStack() as until_registered:
        try:
            patience = patience_of(line, slot, os.environ)
            running = find_running(line, config, until_the_end, until_registered, patience=patience)
            _check_helpers(slot, config, running=running)
            if running is not None:
                boot, coordinator, reached_at = _join(running, slot), running.coordinator, running.endpoints
            else:
                boot, coordinator, reached_at = _start(slot, line, config, until_the_end, until_registered)
            exchange.give(boot)
        except BambooError as error:
            exchange.refuse(how_refused(error))
            raise
        source = find_section(line, os.environ)[1]
        tell(greeting(boot, slot, config, source=source), who=f"rank {_placed(slot, boot).rank}")
        hooks = AgentHooks(on_registered=until_registered.close, on_all_present=exchange.close)
        settings = replace(command.settings(boot, reached_at), hosts_coordinator=boot.host_pid == os.getpid())
        return _be_agent(_placed(slot, boot), boot, line, coordinator=coordinator, settings=settings, hooks=hooks)


def _check_helpers(slot: Slot, config: BambooConfig, *, running: RunningJob | None) -> None:
    """Raise LaunchError for workers that would wait for ever, because without redundancy nobody is ever taken in."""
    if config.redundancy.mode != "off":
        return
    rule = 'redundancy.mode is "off", and without redundancy a job accepts no further workers'
    if running is not None:
        raise LaunchError(
            f"job {running.coordinator.job!r} is already running; {rule}. Start the job in another mode, so that "
            "workers can join it, or give this command another --job"
        )
    if slot.workers < slot.world_size:
        raise LaunchError(
            f"--workers is {slot.workers} of {slot.world_size} slots, the rest would stand by; {rule}. Leave --workers "
            "out, or set another mode"
        )


def _say_nothing(text: str) -> None:
    """The first slot of the machine says it."""


def _join(running: RunningJob, slot: Slot) -> Boot:
    """Ranks in the running job for all slots of this command."""
    return Boot(
        job=running.coordinator.job,
        prefix=running.prefix,
        endpoints=running.endpoints,
        master_addr=running.address or slot.master_addr,
        master_ports=tuple(free_ports("", count=MAX_RESTARTS + 1)),
        host_pid=running.host_pid,
        ranks=tuple(running.coordinator.next_rank() for _ in range(slot.world_size)),
        salt=running.salt,
        secret=running.secret,
    )


def _start(
    slot: Slot,
    line: CommandLine,
    config: BambooConfig,
    until_the_end: contextlib.ExitStack,
    until_registered: contextlib.ExitStack,
) -> tuple[Boot, JobCoordinator, tuple[str, ...]]:
    """Provide the coordinator of a new job, and where this slot finds it; make sure that the job's name is free."""
    endpoints, server = tuple(config.coordinator.endpoints), None
    secret, salt = secret_to_start(os.environ, alone=slot.one_machine, joinable=bool(endpoints))
    own = "127.0.0.1" if slot.one_machine else listening_address(slot.master_addr, environment=os.environ)
    reached_at, certificate = endpoints, ""
    if not endpoints:
        server, endpoints, certificate = start_own_etcd(until_the_end, own=own, alone=slot.one_machine, secret=secret)
        reached_at = (str(server.endpoint),)
    boot = Boot(
        job=line.job or _job_name(line.script),
        prefix=config.coordinator.prefix,
        endpoints=endpoints,
        # As the first worker's, at which torch's process groups meet.
        master_addr=advertised_address(os.environ, master_addr=own, endpoints=endpoints),
        master_ports=tuple(free_ports("", count=MAX_RESTARTS + 1)),
        host_pid=os.getpid() if server else 0,
        salt=salt,
        secret=secret,
        pipelines=told_pipelines(config),
        certificate=certificate,
    )
    store = until_the_end.enter_context(contextlib.closing(_open(reached_at, config)))
    coordinator = JobCoordinator(store, job=boot.job, prefix=boot.prefix)
    until_registered.enter_context(coordinator.claim_name(lease_seconds=_CLAIM_SECONDS))
    coordinator.record_start(slots=slot.world_size, salt=salt, proof=proof_of(secret))
    if server is not None:
        publish(
            server.directory,
            PublishedJob(
                boot.job, boot.prefix, reached_at[0], os.getpid(), own_pid_namespace(), secret, boot.master_addr
            ),
        )
    return boot, coordinator, reached_at


def _follow(command: _Command, exchange: Exchange) -> int:
    """As any other rank: learn where the coordinator is, and be an agent."""
    # Imports torch, which takes a second, while rank 0 starts the coordinator.
    import deepspeed_bamboo.elastic.agent  # noqa: F401

    within = _BOOT_SECONDS + patience_of(command.line, command.slot, os.environ).seconds
    try:
        boot = exchange.take(within_seconds=within)
    except ExchangeError as error:
        if 0 < command.slot.local_rank < command.slot.rank:
            raise RefusedError(
                f"the output of this machine's first slot says why: {error}", how=how_refused(error)
            ) from error
        raise
    with contextlib.ExitStack() as opened:
        endpoints = reached(boot, opened)
        store = opened.enter_context(contextlib.closing(_open(endpoints, command.config)))
        coordinator = JobCoordinator(store, job=boot.job, prefix=boot.prefix)
        slot, settings = _placed(command.slot, boot), command.settings(boot, endpoints)
        return _be_agent(slot, boot, command.line, coordinator=coordinator, settings=settings)


def _placed(slot: Slot, boot: Boot) -> Slot:
    """``slot`` as the job knows it."""
    return replace(slot, rank=boot.ranks[slot.rank], start_workers=None) if boot.ranks else slot


def _settings(slot: Slot, boot: Boot, config: BambooConfig) -> AgentSettings:
    """What the configuration says."""
    entry = Entry.STANDBY if slot.rank >= slot.workers else Entry.START
    # A machine of a fleet that AWS ends without notice only loses itself, unless somebody wants it otherwise.
    chosen = "sigterm" in config.notices.model_fields_set or not os.environ.get(FLEET)
    drains = config.notices.sigterm == "drain" or not chosen
    rules = Rules(
        entry=Entry.JOIN if boot.ranks else entry,
        max_restarts=config.topology.max_restarts,
        restart_seconds=config.topology.restart_seconds,
        notice_signals=frozenset({signal.SIGUSR1, *([signal.SIGTERM] if drains else [])}),
        grace_seconds=config.notices.grace_seconds,
        hangs=HangRules(config.hangs.after_seconds, config.hangs.start_seconds, config.hangs.action),
    )
    return AgentSettings(
        config.coordinator.lease_seconds,
        rules=rules,
        environment=(
            *EtcdGuard.of(config.coordinator).to_environment().items(),
            *grid_environment(boot.pipelines),
            (START_DIRECTORY, str(Path.cwd())),
            *((CONFIG, str(Path(named).resolve())) for named in [os.environ.get(CONFIG)] if named),
            (OTHER_ENGINES, config.other_engines),
        ),
        compact_seconds=_COMPACT_SECONDS if config.coordinator.compact else None,
    )


def _be_agent(
    slot: Slot,
    boot: Boot,
    line: CommandLine,
    *,
    coordinator: JobCoordinator,
    settings: AgentSettings,
    hooks: AgentHooks | None = None,
) -> int:
    from deepspeed_bamboo.elastic.agent import BambooElasticAgent
    from deepspeed_bamboo.elastic.starting import CommandStarter

    drop_other_launchers_variables(os.environ)
    starter = CommandStarter(WORKER_MODULE, ["--", *line.script_line])
    agent = BambooElasticAgent(slot, boot, coordinator=coordinator, starter=starter, settings=settings, hooks=hooks)
    try:
        agent.run()
    except CoordinationError as error:
        raise LaunchError(f"the agent of rank {slot.rank} lost its coordinator: {error}") from error
    OutcomeNote(os.environ).write(agent.note)
    return agent.exit_code


def drop_other_launchers_variables(environment: MutableMapping[str, str]) -> None:
    """What a launcher of torch's around this command says is about another job: who serves the store, mostly."""
    for name in [name for name in environment if name.startswith("TORCHELASTIC_")]:
        del environment[name]


def _open(endpoints: Sequence[str], config: BambooConfig) -> EtcdStore:
    return open_store(
        endpoints, within_seconds=config.coordinator.connect_timeout_seconds, guard=EtcdGuard.of(config.coordinator)
    )


def _start_workers(wanted: int | None, slots: int) -> int | None:
    """The option --workers. Raises LaunchError when there are not so many slots."""
    if wanted is not None and not 1 <= wanted <= slots:
        raise LaunchError(f"--workers is {wanted}, but this command has {slots} slots; give a number from 1 to {slots}")
    return wanted


def _job_name(script: str) -> str:
    return f"{key_part(Path(script).stem)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _first_number(passed: int | None, variable: str | None) -> int:
    if passed is not None:
        return passed
    return int(variable) if variable is not None and variable.isdigit() else 0
