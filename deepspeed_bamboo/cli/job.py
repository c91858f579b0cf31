"""``ds_bamboo status``, ``drain`` and ``stop``: show a running job, and send it requests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepspeed_bamboo.cli.asking import agreed
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.options import filled, path_text, seconds

if TYPE_CHECKING:
    from deepspeed_bamboo.coordination import EtcdGuard, JobCoordinator
    from deepspeed_bamboo.coordination.records import AgentRecord, EndedJob

_CONNECT_SECONDS = 5.0
_CALL_SECONDS = 3.0  # a person waits; on a loaded machine an answer may take more than a second
_STOPS_TRAINING = (
    "will end at the next iteration boundary. A script that looks at engine.finished leaves its loop there and runs "
    "the code after it; any other script ends there"
)
_LEFT = "will be left at the next iteration boundary"
_ALL_LEFT = (
    "is to be left, but the job has no other node to move to: it trains on here until one joins. Start its command on "
    "another machine, or end it with ds_bamboo stop"
)
_STOPS_START = "has not started to train, so it ends now (with exit code 1)"
_ELSEWHERE = "For a job that uses your own etcd give --endpoints or --deepspeed_config"


class NotMeantError(BambooError):
    """A command that changes a job did not name it, and nobody confirmed that the only job is meant."""


class NoSuchJobError(BambooError):
    """There is no such job, or no such node in it; the message lists those that exist."""


class SeveralJobsError(BambooError):
    """Several jobs run there, and the command names none."""


class UnsettledJobError(BambooError):
    """The job on this machine does not answer, as it is just starting or ending."""


class KeepsEtcdError(BambooError):
    """The node to be left is the one without which the job ends."""


class NoUserError(BambooError):
    """The job's etcd has users and passwords, and the command names none."""


def add_parser(subparsers: Any) -> None:
    """Register the three commands."""
    status = subparsers.add_parser("status", help="who takes part in a running job, and what each worker hosts")
    add_job_options(status)
    status.add_argument(
        "--watch",
        action="store_true",
        help="a live screen until the job is over; where the output is no terminal, a line for whatever is new",
    )
    status.add_argument("--json", action="store_true", help="print JSON; with --watch one line each second")
    status.set_defaults(run=run_status)

    drain = subparsers.add_parser("drain", help="move a running job off a node, without losing anything")
    drain.add_argument("node", type=filled, metavar="NODE", help="the node, as ds_bamboo status calls it")
    add_job_options(drain)
    _add_yes(drain)
    how = drain.add_mutually_exclusive_group()
    how.add_argument(
        "--deadline-seconds",
        type=seconds,
        metavar="S",
        help="when the node will be gone (default: no hurry)",
    )
    how.add_argument("--cancel", action="store_true", help="withdraw the request")
    drain.set_defaults(run=run_drain)

    stop = subparsers.add_parser(
        "stop", help="end a running job at its next iteration boundary, or at once while it starts"
    )
    add_job_options(stop)
    _add_yes(stop)
    stop.set_defaults(run=run_stop)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the state of the job. Raises what :func:`opened_job` does."""
    from deepspeed_bamboo.cli.job_view import look
    from deepspeed_bamboo.cli.status_screen import screen
    from deepspeed_bamboo.cli.status_watch import terminal_cells, watch
    from deepspeed_bamboo.cli.status_words import ended_line

    with contextlib.ExitStack() as opened:
        try:
            coordinator = opened.enter_context(opened_job(arguments))
        except NoSuchJobError:
            end = last_end(arguments)
            if end is None:
                raise
            print(json.dumps(end.to_json(), indent=2) if arguments.json else ended_line(end))
            return 0
        if arguments.watch:
            return watch(coordinator, as_json=arguments.json, external=_is_external(arguments))
        view = look(coordinator)
        text = "\n".join(screen(view, cells=terminal_cells()))
        print(json.dumps(view.to_json(), indent=2) if arguments.json else text)
    return 0


def run_drain(arguments: argparse.Namespace) -> int:
    """Request or take back the drain of a node. Raises NoSuchJobError for one that has no part in the job.

    To take back is to name one that is to be left.
    """
    with opened_job(arguments) as coordinator:
        _confirm(arguments, f"leave node {arguments.node} of job {coordinator.job}")
        job, draining = coordinator.job, coordinator.draining()
        if arguments.cancel:
            if arguments.node not in draining:
                those = f"those that are: {', '.join(sorted(draining))}" if draining else "none is"
                raise NoSuchJobError(f"node {arguments.node!r} of job {job!r} is not to be left; {those}")
            coordinator.cancel_drain(arguments.node)
            print(f"job {job}: node {arguments.node} may stay")
            return 0
        nodes = _nodes(coordinator)
        if arguments.node not in nodes:
            raise NoSuchJobError(
                f"no node {arguments.node!r} takes part in job {job!r}; its nodes are {', '.join(sorted(nodes))}"
            )
        _check_etcd_stays(arguments, coordinator.agents().values())
        coordinator.request_drain(arguments.node, deadline_seconds=arguments.deadline_seconds, reason="ds_bamboo drain")
        print(f"job {job}: node {arguments.node} {_LEFT if nodes - {*draining, arguments.node} else _ALL_LEFT}")
    return 0


def _nodes(coordinator: JobCoordinator) -> set[str]:
    """The nodes on which the job runs. Raises NoSuchJobError where nobody runs it, who would read a request."""
    agents, members = coordinator.agents().values(), coordinator.members().values()
    nodes = {agent.node for agent in agents} | {member.node for member in members}
    if not nodes:
        raise NoSuchJobError(
            f"nobody runs job {coordinator.job!r} now, so nobody would read this request; a machine that starts its "
            "command again (ds_bamboo run, a fleet) continues it. End those machines (ds_bamboo fleet down), or ask "
            "again once the job is there"
        )
    return nodes


def _check_etcd_stays(arguments: argparse.Namespace, agents: Collection[AgentRecord]) -> None:
    """Raise KeepsEtcdError where the job would end with the node, unless it is gone at a known time anyway."""
    keeps = any(agent.keeps_etcd and agent.node == arguments.node for agent in agents)
    if keeps and arguments.deadline_seconds is None and any(agent.node != arguments.node for agent in agents):
        raise KeepsEtcdError(
            f"node {arguments.node} has the job's own etcd, and the job ends with it, on all machines; stop the job "
            "(ds_bamboo stop), and start it with coordinator.endpoints, an etcd that stays. If that machine will be "
            "gone anyway, give --deadline-seconds: its workers leave, and the others continue until then"
        )


def run_stop(arguments: argparse.Namespace) -> int:
    """Request the end of the job. Raises NoSuchJobError where nobody runs it."""
    with opened_job(arguments) as coordinator:
        _confirm(arguments, f"end job {coordinator.job}")
        _nodes(coordinator)
        trains = coordinator.peek_epoch() is not None
        coordinator.request_stop("ds_bamboo stop")
        print(f"job {coordinator.job}: {_STOPS_TRAINING if trains else _STOPS_START}")
    return 0


def add_job_options(
    parser: argparse.ArgumentParser, *, without: str = "default: that of your job on this machine"
) -> None:
    """``without``: what is the case where neither option says where the job's etcd is."""
    parser.add_argument(
        "--job", type=filled, metavar="NAME", help="the job's name (default: the only one that runs there)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--endpoints",
        type=filled,
        metavar="HOSTS",
        help=f"its etcd as HOST:PORT,..., without password or TLS ({without})",
    )
    where.add_argument(
        "--deepspeed_config",
        type=path_text,
        metavar="FILE",
        help="the DeepSpeed JSON that it runs with, which says where etcd is",
    )


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="act on the only job without --job")


def _confirm(arguments: argparse.Namespace, what: str) -> None:
    """Ask whether the only job is meant, if the command does not name it. Raises NotMeantError."""
    if arguments.job is not None or arguments.yes:
        return
    unnamed = f"this would {what}, which the command does not name; give --job NAME, or --yes to confirm"
    if not agreed(f"{what[0].upper()}{what[1:]}?", otherwise=NotMeantError(unnamed)):
        raise NotMeantError("not confirmed; nothing was changed")


def _is_external(arguments: argparse.Namespace) -> bool:
    """Whether the job's etcd is one that outlives it."""
    return bool(_where(arguments)[0])


def own_etcd(arguments: argparse.Namespace) -> tuple[list[str], EtcdGuard]:
    """The etcd that the options name and that outlives the job, and how it is reached. Nobody is asked yet.

    Raises ConfigError, of which EndpointError is one, and NoSuchJobError for a configuration of plain DeepSpeed.
    """
    from deepspeed_bamboo.coordination import parse_endpoints
    from deepspeed_bamboo.errors import ConfigError

    endpoints, _, guard = _where(arguments)
    if not endpoints:
        named = arguments.deepspeed_config
        missing = f"{named} names none; set coordinator.endpoints in it" if named else "the command names none; give "
        remedy = "" if named else "--deepspeed_config FILE, which is the job's own, or --endpoints HOST:PORT"
        raise ConfigError(f"the machines of a fleet meet at an etcd of yours, and {missing}{remedy}")
    parse_endpoints(endpoints)
    guard.check(os.environ)
    return endpoints, guard


def last_end(arguments: argparse.Namespace) -> EndedJob | None:
    """How the job that the options name ended, if it no longer exists; without a name: the last one on this machine."""
    from deepspeed_bamboo.coordination import JobCoordinator
    from deepspeed_bamboo.coordination.ended import ended_folder, ended_jobs
    from deepspeed_bamboo.elastic.running_job import open_store

    endpoints, prefix, guard = _where(arguments)
    if endpoints:
        if arguments.job is None:
            return None
        with contextlib.closing(open_store(endpoints, within_seconds=_CONNECT_SECONDS, guard=guard)) as store:
            return JobCoordinator(store, job=arguments.job, prefix=prefix).last_end()
    ended = ended_jobs(ended_folder(os.environ))
    return next((end for end in ended if arguments.job in (None, end.job)), None)


def _where(arguments: argparse.Namespace) -> tuple[list[str], str, EtcdGuard]:
    """Endpoints (none: the job's own etcd, on this machine), prefix, and how etcd is reached.

    Raises NoSuchJobError for a configuration of plain DeepSpeed.
    """
    from deepspeed_bamboo.coordination import DEFAULT_PREFIX, EtcdGuard

    if arguments.endpoints is not None:
        return arguments.endpoints.split(","), DEFAULT_PREFIX, EtcdGuard()
    if arguments.deepspeed_config is None:
        return [], DEFAULT_PREFIX, EtcdGuard()
    from deepspeed_bamboo.elastic.settings_source import load_section

    section = load_section(arguments.deepspeed_config)
    if section is None or not section.enabled:
        raise NoSuchJobError(
            f'{arguments.deepspeed_config} has no "bamboo" section that is on: it starts plain DeepSpeed, which is no '
            "job to be found; name the configuration of the job"
        )
    return list(section.coordinator.endpoints), section.coordinator.prefix, EtcdGuard.of(section.coordinator)


@contextmanager
def opened_job(arguments: argparse.Namespace) -> Iterator[JobCoordinator]:
    """The job that the options name.

    Raises NoSuchJobError that lists those that there are, SeveralJobsError, UnsettledJobError, NoUserError and
    CoordinatorUnavailable.
    """
    endpoints, prefix, guard = _where(arguments)
    with contextlib.ExitStack() as opened:
        if endpoints:
            yield _find(arguments.job, endpoints, prefix=prefix, guard=guard, opened=opened)
        else:
            yield _find_here(arguments.job, opened)


def _find(
    job: str | None, endpoints: list[str], *, prefix: str, guard: Any, opened: contextlib.ExitStack
) -> JobCoordinator:
    """The job of that name there; None: the only one."""
    from deepspeed_bamboo.coordination import JobCoordinator, running_jobs
    from deepspeed_bamboo.elastic.running_job import open_store

    with _user_named(guard, endpoints):
        store = open_store(endpoints, within_seconds=_CONNECT_SECONDS, guard=guard, call_seconds=_CALL_SECONDS)
    opened.callback(store.close)
    where = f"at {','.join(endpoints)} under {prefix}"
    if job is None:
        job = _only(running_jobs(store, prefix=prefix), where=where)
    coordinator = JobCoordinator(store, job=job, prefix=prefix)
    if not is_there(coordinator):
        raise NoSuchJobError(f"no job {job!r} {where}; {_those(running_jobs(store, prefix=prefix))}")
    return coordinator


def is_there(coordinator: JobCoordinator) -> bool:
    """Whether anything of the job is there, if only what it left."""
    return bool(coordinator.agents()) or coordinator.peek_epoch() is not None or coordinator.failure() is not None


@contextmanager
def _user_named(guard: EtcdGuard | None, endpoints: list[str]) -> Iterator[None]:
    """Say what to do where etcd wants a user and the command line names only its address. Raises NoUserError."""
    from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable

    try:
        yield
    except CoordinatorUnavailable as error:
        if not error.refused or guard is None or guard.username is not None:
            raise
        raise NoUserError(
            f"the etcd at {','.join(endpoints)} lets only known users in ({error.reason}), and --endpoints names none; "
            "give --deepspeed_config FILE instead, the job's own: its section says who the user is, and which variable "
            "has the password"
        ) from error


def _find_here(job: str | None, opened: contextlib.ExitStack) -> JobCoordinator:
    """As :func:`_find`, among the jobs on this machine that have an etcd of their own."""
    from deepspeed_bamboo.coordination.published import published_jobs

    there = sorted({found.job for found in published_jobs()})
    if job is None:
        job = _only(there, where="of yours with an etcd of its own on this machine", remedy=_ELSEWHERE)
    for found in published_jobs(job):
        with contextlib.suppress(BambooError):
            return _find(job, [found.endpoint], prefix=found.prefix, guard=None, opened=opened)
    if job in there:
        raise UnsettledJobError(f"the job {job!r} on this machine is just starting or ending; try again in a moment")
    raise NoSuchJobError(
        f"no job {job!r} of yours with an etcd of its own on this machine; {_those(there)}. {_ELSEWHERE}"
    )


def _only(jobs: list[str], *, where: str, remedy: str = "") -> str:
    """The one job that there is. Raises NoSuchJobError for none, and SeveralJobsError that lists them."""
    if len(jobs) > 1:
        raise SeveralJobsError(f"several jobs run {where}: {', '.join(jobs)}; name one with --job NAME")
    if not jobs:
        raise NoSuchJobError(f"no job {where}. {remedy}".rstrip())
    return jobs[0]


def _those(jobs: list[str]) -> str:
    return f"running are {', '.join(jobs)}" if jobs else "no job runs there"
