"""Checks etcd: every member answers, accepts writes, and is fast enough."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterator

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinationError, CoordinatorUnavailable, EndpointError
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_WRITES = 5
_QUOTA_BYTES = 2 * 1024**3
_FULL_SHARE = 0.5
_SLOW_SHARE = 1 / 30  # of the lease: a loss takes several writes, one after the other
_LEASE_SECONDS = 10.0


def check_coordinator(subject: Subject) -> Iterator[Finding]:
    """Nothing for a job that starts its own etcd."""
    settings = subject.section.coordinator
    guard = EtcdGuard.of(settings)
    try:
        guard.check(subject.environment)
    except EndpointError as error:
        yield Finding(str(error), "etcd can't be checked before that is right")
        return
    away: list[tuple[str, str]] = []
    for text in settings.endpoints:
        store = EtcdStore([Endpoint.parse(text)], guard=guard, call_timeout_seconds=settings.connect_timeout_seconds)
        try:
            store.ping(within_seconds=settings.connect_timeout_seconds)
            yield from _written(store, text, prefix=settings.prefix, lease_seconds=settings.lease_seconds)
            yield from room(text, store.database_bytes())
        except (CoordinationError, EndpointError) as error:
            away.append((f"etcd at {text}: {error}", _remedy(error)))
        finally:
            store.close()
    for problem, remedy in away:
        yield Finding(problem, remedy, blocker=2 * len(away) >= len(settings.endpoints))
    if len(settings.endpoints) == 2:
        yield warning("etcd with 2 members stops when one of them is down", "use 1 member or 3")


def _remedy(error: Exception) -> str:
    if isinstance(error, CoordinatorUnavailable) and error.refused:
        return "it runs, so don't restart it: correct user, password or role"
    if isinstance(error, CoordinatorUnavailable) and error.answered:
        return "it answers, so don't restart it: do what the line above says"
    return "start it, or open its port to this machine; fewer than half of the members may be down for a while"


def room(endpoint: str, database_bytes: int) -> Iterator[Finding]:
    """How close the database is to etcd's default quota, beyond which it refuses writes."""
    if database_bytes > _QUOTA_BYTES * _FULL_SHARE:
        yield warning(
            f"the database of etcd at {endpoint} has {database_bytes / 1e6:.0f} MB; at its quota (2147 MB by default) "
            "it refuses writes, and the job can't react to a loss",
            "compact and defragment it; start it with --auto-compaction-mode=periodic --auto-compaction-retention=1h",
        )


def _written(store: EtcdStore, endpoint: str, *, prefix: str, lease_seconds: float) -> Iterator[Finding]:
    key = f"{prefix}/doctor/{uuid.uuid4().hex}"
    took = []
    lease = store.grant_lease(_LEASE_SECONDS)
    try:
        for number in range(_WRITES):
            start = time.perf_counter()
            store.put(key, str(number), lease=lease)
            took.append(time.perf_counter() - start)
    finally:
        store.revoke(lease)
    seconds = statistics.median(took)
    if seconds > lease_seconds * _SLOW_SHARE:
        yield warning(
            f"etcd at {endpoint} takes {1000 * seconds:.0f} ms for a write, and the lease is {lease_seconds:g} s",
            "put it on a fast disk near the workers, or raise coordinator.lease_seconds",
        )
