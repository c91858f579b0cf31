"""The store at which torch's process groups meet: a TCPStore on one address, for those who know the job secret."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.frames import Frames
from deepspeed_bamboo.runtime.comm.store_server import PURPOSE
from deepspeed_bamboo.trust.handshake import StrangerError
from deepspeed_bamboo.trust.server import connect

_CONNECT_SECONDS = 30.0
_AGAIN_SECONDS = 0.05
_SERVER_SECONDS = 5.0  # so much longer than it may wait for a key


class StoreClient(c10d.Store):  # type: ignore[misc,name-defined]
    """torch's Store at a :class:`StoreServer`. As with a TCPStore, who waits keeps all others waiting.

    torch keeps no reference to the Python object: whoever makes it must, for as long as torch uses it.
    """

    def __init__(self, host: str, port: int, *, secret: str, timeout: timedelta, insist: bool = False) -> None:
        """``with_retries``: wait for a server that is not there yet.

        Raises RuntimeError when there is none within ``timeout``, or it does not know the secret.
        """
        super().__init__()
        self._where, self._secret, self._seconds = (host, port), secret, timeout.total_seconds()
        self._lock = threading.Lock()
        self._connection = self._connect(insist=insist)
        self._frames = Frames(self._connection)
        self._owed = 0  # answers to what was written, which nobody has waited for
        self._clones: list[StoreClient] = []

    def is_open(self) -> bool:
        """False once the server has gone, or the connection is broken. Only between two calls."""
        readable = select.poll()
        try:
            readable.register(self._connection, select.POLLIN)
            return not readable.poll(0) or self._connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):
            return False

    def _connect(self, *, insist: bool) -> socket.socket:
        (host, port), deadline = self._where, time.monotonic() + self._seconds
        while True:
            within = min(self._seconds, _CONNECT_SECONDS)
            try:
                return connect(host, port, secret=self._secret, purpose=PURPOSE, within_seconds=within)
            except (OSError, StrangerError) as error:
                if not insist or isinstance(error, StrangerError) or time.monotonic() > deadline:
                    raise c10d.DistNetworkError(f"the store at {host}:{port} can't be reached: {error}") from error
            time.sleep(_AGAIN_SECONDS)

    def _ask(self, *request: Any, seconds: float | None = None) -> Any:
        """What the server answers. Raises DistStoreError when it has not what is asked for in time."""
        limit = self._seconds if seconds is None else seconds
        with self._lock:
            self._send(request, seconds=limit)
            failed = self._settle()
            answer = self._answer()
            if failed is not None:
                raise failed
            return answer

    def _settle(self) -> Exception | None:
        """Read the answers that nobody has waited for; the first one that says that something failed."""
        failed = None
        while self._owed:
            self._owed -= 1
            try:
                self._answer()
            except c10d.DistStoreError as error:
                failed = failed or error
        return failed

    def _send(self, request: Sequence[Any], *, seconds: float) -> None:
        try:
            self._connection.settimeout(seconds + _SERVER_SECONDS)
            self._frames.send(list(request))
        except OSError as error:
            self._lose(error)

    def _answer(self) -> Any:
        try:
            answer = self._frames.receive()
        except (OSError, MessageError) as error:
            self._lose(error)
        if type(answer) is not list or len(answer) != 2:
            raise c10d.DistNetworkError("the store has been lost: the connection was closed by peer")
        if not answer[0]:
            raise c10d.DistStoreError(str(answer[1]))
        return answer[1]

    def _lose(self, error: Exception) -> NoReturn:
        self._connection.close()  # what comes next on it would be the answer to another question
        raise c10d.DistNetworkError(f"the store has been lost: {error}") from error

    # ---- what torch calls, under its names -----------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Not waited for: should it fail, the next call that asks something says so."""
        with self._lock:
            self._send(("set", key, value.encode() if isinstance(value, str) else bytes(value)), seconds=self._seconds)
            self._owed += 1

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key, self._seconds))

    def fetch(self, key: str, *, within_seconds: float) -> bytes:
        """As :meth:`get`, with a limit of its own. Raises DistStoreError when there is no value by then."""
        return bytes(self._ask("get", key, within_seconds, seconds=within_seconds))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._ask("wait", list(keys), seconds, seconds=seconds)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        before, after = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return bytes(self._ask("swap", key, before, after))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, value.encode() if isinstance(value, str) else bytes(value))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> StoreClient:
        host, port = self._where
        self._clones.append(StoreClient(host, port, secret=self._secret, timeout=self.timeout))
        return self._clones[-1]

    deleteKey, getNumKeys, compareSet, hasExtendedApi = delete_key, num_keys, compare_set, has_extended_api  # noqa: N815
