"""A password turned into the token that each call to an etcd with authentication carries."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import grpc
from etcd3 import etcdrpc
from grpc import StreamStreamClientInterceptor, UnaryUnaryClientInterceptor

_DetailsFields = namedtuple("_DetailsFields", ("method", "timeout", "metadata", "credentials", "wait_for_ready"))


class _Details(_DetailsFields, grpc.ClientCallDetails):  # type: ignore[misc]
    """The details of a call, which grpc wants as attributes."""


class TokenInterceptor(UnaryUnaryClientInterceptor, StreamStreamClientInterceptor):  # type: ignore[misc]
    """Adds a token to every call through one channel; asks for it when there is none.

    An attempt to get one that fails is the failure of the call (grpc.RpcError).
    """

    def __init__(self, channel: Any, *, username: str, password: Callable[[], str]) -> None:
        self._auth = etcdrpc.AuthStub(channel)
        self._username = username
        self._password = password
        self._lock = threading.Lock()
        self._token: str | None = None

    def forget(self) -> None:
        """The token is not accepted (any more): ask for another before the next call."""
        with self._lock:
            self._token = None

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: Any) -> _Details:
        with self._lock:
            if self._token is None:
                request = etcdrpc.AuthenticateRequest(name=self._username, password=self._password())
                self._token = self._auth.Authenticate(request, timeout=details.timeout or 1.0).token
            token = self._token
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("token", token)],
            details.credentials,
            getattr(details, "wait_for_ready", None),
        )
