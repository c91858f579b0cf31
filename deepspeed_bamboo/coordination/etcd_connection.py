"""Calls to whichever of several etcd servers answers, each bounded in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from etcd3 import etcdrpc

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, is_of_another_server
from deepspeed_bamboo.coordination.etcd_token import TokenInterceptor
from deepspeed_bamboo.coordination.guard import EtcdGuard

T = TypeVar("T")

# Answers after which the same call may succeed elsewhere or a little later.
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)

# Reconnect within half a second of an outage's end; never through an HTTP proxy; no state shared between channels.
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Stubs:
    """The remote procedures of one endpoint. Holding on to it keeps its channel open."""

    index: int
    kv: Any
    lease: Any
    watch: Any
    maintenance: Any
    token: TokenInterceptor | None = None

    def forget_token(self) -> None:
        """A call was refused, or ended, for what may be the token's age."""
        if self.token is not None:
            self.token.forget()


class EtcdConnection:
    """Channels to ``endpoints``, used one at a time; a failing one is left for the next.

    etcd3's own client is not used for calls: it shares mutable state between threads without a lock
    and shuts a failed endpoint out for five minutes. Its generated messages and stubs are.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        call_timeout_seconds: float,
        attempt_timeout_seconds: float,
        guard: EtcdGuard | None = None,
    ) -> None:
        """Raises EndpointError when a file that ``guard`` names can't be read."""
        self.endpoints = tuple(endpoints)
        self._guard = guard or EtcdGuard()
        ca_cert, key, cert = self._guard.files()
        self._credentials = None if ca_cert is None else grpc.ssl_channel_credentials(ca_cert, key, cert)
        self._call_timeout_seconds = call_timeout_seconds
        self._attempt_timeout_seconds = attempt_timeout_seconds
        self._lock = threading.Lock()
        self._stubs: dict[int, Stubs] = {}
        self._current = 0
        self._closed = False

    def call(self, send: Callable[[Stubs, float], T], *, budget_seconds: float | None = None) -> tuple[T, bool]:
        """``send(stubs, timeout)``, repeated on passing errors until the budget is used up.

        Returns the answer, and whether an earlier attempt may have taken effect unseen.
        Raises CoordinatorUnavailable when there is no answer in time, or one that repeating won't change.
        A NOT_FOUND is an answer, not a failure: it is raised as grpc.RpcError for the caller to judge.
        """
        budget = self._call_timeout_seconds if budget_seconds is None else budget_seconds
        start = time.monotonic()
        repeated = False
        reason = "not tried"
        while (remaining := start + budget - time.monotonic()) > 0:
            stubs = self.pick()
            try:
                return send(stubs, min(remaining, self._attempt_timeout_seconds)), repeated
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or not is_of_another_server(reason):
                    reason = f"{error.code().name}: {error.details()}"  # the last attempt may have had no time left
                if stubs.token is not None and is_about_token(error):
                    stubs.forget_token()
                    time.sleep(_PAUSE_SECONDS)
                    continue
                if error.code() not in _PASSING:
                    raise self._unavailable(start, reason) from error
                self.pass_over(stubs, renew=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
            repeated = True
            time.sleep(_PAUSE_SECONDS)
        raise self._unavailable(start, reason)

    def pick(self) -> Stubs:
        """The endpoint in use. Raises CoordinatorUnavailable after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise self._unavailable(time.monotonic(), "this client was closed")
            stubs = self._stubs.get(self._current)
            if stubs is None:
                stubs = self._stubs[self._current] = self._open(self._current)
            return stubs

    def pass_over(self, stubs: Stubs, *, renew: bool) -> None:
        """Use the next endpoint from now on, if ``stubs`` is the one in use.

        ``renew`` gives up the connection too: one that swallowed a call may be cut off without knowing.
        Calls in flight on it run on; the channel closes when the last reference to it goes.
        """
        with self._lock:
            if renew and self._stubs.get(stubs.index) is stubs:
                del self._stubs[stubs.index]
            if self._current == stubs.index:
                self._current = (self._current + 1) % len(self.endpoints)

    def close(self) -> None:
        """Refuse further calls and drop the channels."""
        with self._lock:
            self._closed = True
            self._stubs.clear()

    def _open(self, index: int) -> Stubs:
        address, token = str(self.endpoints[index]), None
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)
        if self._guard.username is not None:
            token = TokenInterceptor(
                channel, username=self._guard.username, password=lambda: self._guard.password(os.environ)
            )
            channel = grpc.intercept_channel(channel, token)
        kv, lease, watch = etcdrpc.KVStub(channel), etcdrpc.LeaseStub(channel), etcdrpc.WatchStub(channel)
        return Stubs(index, kv, lease, watch, etcdrpc.MaintenanceStub(channel), token)

    def _unavailable(self, start: float, reason: str) -> CoordinatorUnavailable:
        names = [str(endpoint) for endpoint in self.endpoints]
        return CoordinatorUnavailable(endpoints=names, tried_seconds=time.monotonic() - start, reason=reason)


def is_about_token(error: grpc.RpcError) -> bool:
    """Whether another token may help: this one is too old, or from before etcd's users were changed."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return True
    return error.code() is grpc.StatusCode.INVALID_ARGUMENT and "revision of auth store" in (error.details() or "")
