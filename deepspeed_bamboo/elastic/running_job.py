"""Finding the running job that a command names, so that its slots join instead of starting another."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepspeed_bamboo.coordination import (
    CoordinatorUnavailable,
    EtcdGuard,
    JobCoordinator,
    JobNameTaken,
    parse_endpoints,
)
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.machine_token import MachineToken
from deepspeed_bamboo.coordination.published import PublishedJob, published_jobs

_CALL_SECONDS = 1.0
_LOOK_SECONDS = 0.2
_OWNER_ELSEWHERE = -1  # in another pid namespace: its etcd may end, but its process can't be watched


@dataclass(frozen=True)
class RunningJob:
    """A job that can be joined, where its etcd is, the process that keeps it (0: nobody's of the job), its secret.

    ``address``: of the machine that it started on; empty if that does not matter. ``salt``: see ``Boot``.
    """

    coordinator: JobCoordinator
    prefix: str
    endpoints: tuple[str, ...]
    host_pid: int = 0
    secret: str = field(default="", repr=False)
    salt: str = ""
    address: str = ""


def open_store(
    endpoints: Sequence[str],
    *,
    within_seconds: float,
    guard: EtcdGuard | None = None,
    call_seconds: float = _CALL_SECONDS,
) -> EtcdStore:
    """A store that answers, and then each call within ``call_seconds``.

    Raises CoordinatorUnavailable naming the endpoints and how long they were tried.
    """
    store = EtcdStore(
        parse_endpoints(endpoints), call_timeout_seconds=call_seconds, attempt_timeout_seconds=0.5, guard=guard
    )
    try:
        store.ping(within_seconds=within_seconds)
    except BaseException:
        store.close()
        raise
    return store


@dataclass(frozen=True)
class Patience:
    """How long to wait for a job that is just starting, and what to call once with that news.

    ``through_end``: so long also for the end of one that is about to end.
    """

    seconds: float = 0.0
    tell: Callable[[str], None] = field(default=lambda text: None)
    through_end: bool = False


def can_be_joined(coordinator: JobCoordinator, patience: Patience = Patience()) -> bool:
    """Whether the job runs and has begun to train; waits for the latter as long as ``patience`` lasts.

    Raises JobNameTaken when it is alive but can't be joined then, because it is about to begin or to end.
    """
    deadline, told = time.monotonic() + patience.seconds, ""
    while (present := bool(coordinator.agents())) or coordinator.is_being_started():
        # Without agents, whatever else is there was left by a dead job of this name.
        ending = present and _is_ending(coordinator)
        if present and not ending and coordinator.peek_epoch() is not None:
            return True
        if time.monotonic() >= deadline or (ending and not patience.through_end):
            raise _about_to_end(coordinator.job) if ending else _just_starting(coordinator.job)
        news = f"job {coordinator.job!r} is just starting; this command joins it when it trains"
        if ending:
            news = f"job {coordinator.job!r} is about to end; this command waits until it has"
        if news != told:
            told = news
            patience.tell(news)
        time.sleep(_LOOK_SECONDS)
    return False


def _is_ending(coordinator: JobCoordinator) -> bool:
    said = coordinator.stop_requested(), coordinator.finished(), coordinator.failure()
    return any(one is not None for one in said)


def _about_to_end(job: str) -> JobNameTaken:
    return JobNameTaken(
        f"the job {job!r} is about to end; start this command again in a moment, or give it another --job"
    )


def _just_starting(job: str) -> JobNameTaken:
    return JobNameTaken(
        f"a job named {job!r} is just starting and can't be joined before it trains; start this command again in a "
        "moment, or "
        "give this one another name with --job NAME"
    )


@contextmanager
def private_name(name: str, *, within_seconds: float) -> Iterator[None]:
    """Be the only one of this user on this machine who looks for job ``name``, or starts it with an etcd of its own.

    Whoever starts it leaves this when an agent is registered, so that the next one to look finds it. Another command
    that is here is waited for that long; then JobNameTaken is raised, for it must be starting the job.
    """
    token = MachineToken("private job", tempfile.gettempdir(), name)
    if not token.take(within_seconds=within_seconds):
        raise _just_starting(name)
    try:
        yield
    finally:
        token.release()


@contextmanager
def private_job(name: str, *, within_seconds: float, patience: Patience = Patience()) -> Iterator[RunningJob | None]:
    """The job ``name`` of this user and machine that has an etcd of its own; None when there is none.

    Raises JobNameTaken as :func:`can_be_joined` does.
    """
    with contextlib.ExitStack() as opened:
        for found in published_jobs(name):
            running = _look_at(found, opened, within_seconds=within_seconds, patience=patience)
            if running is not None:
                yield running
                return
        yield None


def _look_at(
    found: PublishedJob, opened: contextlib.ExitStack, *, within_seconds: float, patience: Patience
) -> RunningJob | None:
    try:
        store = open_store([found.endpoint], within_seconds=within_seconds)
    except CoordinatorUnavailable:
        _check_gone(found, within_seconds=within_seconds)
        return None
    opened.callback(store.close)
    coordinator = JobCoordinator(store, job=found.job, prefix=found.prefix)
    try:
        if not can_be_joined(coordinator, patience):
            return None
    except CoordinatorUnavailable as error:
        _check_gone(found, within_seconds=error.tried_seconds)
        return None
    owner = found.owner_pid if found.same_namespace else _OWNER_ELSEWHERE
    return RunningJob(coordinator, found.prefix, (found.endpoint,), owner, found.secret, address=found.address)


def _check_gone(found: PublishedJob, *, within_seconds: float) -> None:
    """Raise JobNameTaken unless the etcd that does not answer has gone with its owner."""
    if found in published_jobs(found.job):
        raise JobNameTaken(
            f"the etcd of a job named {found.job!r} at {found.endpoint} has not answered for {within_seconds:g} s, and "
            f"process {found.owner_pid}, which keeps it, is there; start this again in a moment, end that process, or "
            "give this job another name with --job NAME"
        ) from None
