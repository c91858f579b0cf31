"""Whether a command joins a job, starts one, or has nothing to do because its job is complete."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.coordination import EtcdGuard, JobCoordinator
from deepspeed_bamboo.coordination.ended import ended_folder, ended_jobs
from deepspeed_bamboo.coordination.records import EndedJob
from deepspeed_bamboo.elastic.command_line import CommandLine
from deepspeed_bamboo.elastic.errors import JobOverError, LaunchError, NotYetError
from deepspeed_bamboo.elastic.job_secrets import secret_to_join
from deepspeed_bamboo.elastic.outcome import FINISHED, read_notes
from deepspeed_bamboo.elastic.running_job import (
    Patience,
    RunningJob,
    can_be_joined,
    open_store,
    private_job,
    private_name,
)
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.news import tell
from deepspeed_bamboo.protocol import FLEET, OUTCOME, SINCE

# For a job that is starting. Importing everything and building a large model takes minutes.
_JOIN_SECONDS = 1800.0
# The slots of other machines may not know that this command is repeated, so rank 0 answers them soon.
_JOIN_TOGETHER_SECONDS = 60.0
_CLEANING_LOOKS, _LOOK_SECONDS = 10, 0.2


def patience_of(line: CommandLine, slot: Slot, environment: Mapping[str, str]) -> Patience:
    """How long to wait for a job that is just starting: long for --join and under ``ds_bamboo run``.

    Who says that a job must run may have started it a moment ago, on another machine. Under ``ds_bamboo run`` a
    command is repeated anyway, and the machines of a fleet start at the same moment.
    """
    repeated = bool(environment.get(OUTCOME))
    seconds = _JOIN_TOGETHER_SECONDS if repeated and not slot.one_machine else _JOIN_SECONDS
    return Patience(seconds if repeated or line.join else 0.0, tell, through_end=repeated)


def check_fleet(
    line: CommandLine, config: BambooConfig, environment: Mapping[str, str], *, one_machine: bool = True
) -> None:
    """Raise LaunchError on a machine of a fleet that would start a job of its own, as all the others would.

    ``one_machine``: whether the command starts a job on this machine alone, and not on all of them together.
    """
    fleet = environment.get(FLEET)
    if not fleet or not one_machine:
        return
    remedy = None
    if not config.coordinator.endpoints:
        remedy = "set bamboo.coordinator.endpoints to an etcd that all of them reach"
    elif line.job is None:
        remedy = "add --job NAME before the script in the fleet's command"
    if remedy is not None:
        raise LaunchError(
            f"each machine of fleet {fleet!r} would start a job of its own, over the results of the others; {remedy}, "
            f'or, for a fleet of one machine, set {FLEET} to "" in the environment of its spec'
        )


def find_running(
    line: CommandLine,
    config: BambooConfig,
    opened: contextlib.ExitStack,
    until_registered: contextlib.ExitStack,
    *,
    patience: Patience,
) -> RunningJob | None:
    """The job that the command names, if it runs; otherwise its name is this command's ``until_registered``.

    Raises NotYetError when it must run and does not, and JobOverError when it is complete.
    """
    if line.job is None:
        return None
    if not config.coordinator.endpoints:
        return _find_private(line, config, opened, until_registered, patience=patience)
    endpoints, prefix = tuple(config.coordinator.endpoints), config.coordinator.prefix
    store = open_store(
        endpoints, within_seconds=config.coordinator.connect_timeout_seconds, guard=EtcdGuard.of(config.coordinator)
    )
    opened.enter_context(contextlib.closing(store))
    coordinator = JobCoordinator(store, job=line.job, prefix=prefix)
    if can_be_joined(coordinator, patience):
        return _joined(coordinator, prefix, endpoints)
    if _wanted_once(os.environ):
        check_not_over(_last_end(coordinator), os.environ)
    if line.join:
        raise NotYetError(
            f"no job {line.job!r} runs at {', '.join(endpoints)} under {prefix}; check its name, or leave --join out "
            "to start it"
        )
    return None


def _joined(coordinator: JobCoordinator, prefix: str, endpoints: tuple[str, ...]) -> RunningJob:
    try:
        secret, salt = secret_to_join(coordinator, os.environ)
    except LaunchError as error:
        if not coordinator.agents():
            raise NotYetError(f"job {coordinator.job!r} has just ended; start this command again") from error
        raise
    return RunningJob(coordinator, prefix, endpoints, secret=secret, salt=salt)


def _find_private(
    line: CommandLine,
    config: BambooConfig,
    opened: contextlib.ExitStack,
    until_registered: contextlib.ExitStack,
    *,
    patience: Patience,
) -> RunningJob | None:
    """As :func:`find_running`, for a job with an etcd of its own."""
    within, name = config.coordinator.connect_timeout_seconds, str(line.job)
    with contextlib.ExitStack() as claimed:
        claimed.enter_context(private_name(name, within_seconds=max(within, patience.seconds)))
        running = opened.enter_context(private_job(name, within_seconds=within, patience=patience))
        if running is not None:
            return running
        if _wanted_once(os.environ):
            ends = ended_jobs(ended_folder(os.environ))
            check_not_over(next((end for end in ends if end.job == name), None), os.environ)
        if line.join:
            raise NotYetError(
                f"no job {name!r} with an etcd of its own runs on this machine; such a job can be joined by "
                "the same user on its first machine only. For one that runs elsewhere set coordinator.endpoints, "
                "there and here, to an etcd that both machines reach"
            )
        until_registered.push(claimed.pop_all())
    return None


def _wanted_once(environment: Mapping[str, str]) -> bool:
    """Whether a job that is complete since a known time need not be started again.

    A command that starts one job after the other by the same name (two `deepspeed ...` in one `bash -c`) wants each.
    """
    folder = environment.get(OUTCOME)
    trained = folder and any(note.how == FINISHED and not note.message for note in read_notes(Path(folder)))
    return bool(environment.get(SINCE)) and not trained


def check_not_over(end: EndedJob | None, environment: Mapping[str, str]) -> None:
    """Raise JobOverError for a job that was completed, or stopped, after the command was first given.

    Otherwise a machine that comes back, or replaces one, would train it once more, over its results. Raises LaunchError
    for one that ended by an error that a start anew does not mend.
    """
    try:
        since_seconds = float(environment.get(SINCE, ""))
    except ValueError:
        return
    if end is None or not end.final or end.time_seconds < since_seconds:
        return
    at = datetime.fromtimestamp(end.time_seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    fleet = environment.get(FLEET)
    remedy = "to start it once more give this command again"
    if fleet:
        remedy = f"this machine goes on costing: `ds_bamboo fleet down {fleet}` ends the fleet"
    if end.state not in ("finished", "stopped"):
        raise LaunchError(
            f"the job {end.job!r} failed at {at} by an error that would come again ({end.detail or end.failure}), so "
            f"this machine does not start it; mend that; {remedy}"
        )
    how = "complete" if end.state == "finished" else "stopped"
    raise JobOverError(f"the job {end.job!r} is {how} since {at}, so this machine does not start it; {remedy}")


def _last_end(coordinator: JobCoordinator) -> EndedJob | None:
    """How the last job of this name ended; its last agent may be about to write it down."""
    for _ in range(_CLEANING_LOOKS):
        end = coordinator.last_end()
        if end is not None or coordinator.finished() is None or coordinator.agents():
            return end
        time.sleep(_LOOK_SECONDS)
    return None
