"""The server behind :mod:`guarded_store`: small values by key, for those who know the job secret."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.frames import Frames
from deepspeed_bamboo.trust.server import GuardedServer

logger = logging.getLogger(__name__)
PURPOSE = "store"
_LONGEST_WAIT_SECONDS = 86_400.0


class StoreServer:
    """Answers :class:`StoreClient` on ``host``; one thread for each client."""

    def __init__(self, host: str, port: int = 0, *, secret: str) -> None:
        """Raises OSError where nobody can listen there."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._calls: Mapping[str, Callable[..., Any]] = {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "check": self._check,
            "wait": self._wait,
            "swap": self._swap,
            "delete": self._delete,
            "count": self._count,
            "append": self._append,
        }
        self._server = GuardedServer(host, port, secret=secret, purpose=PURPOSE, serve=self._serve)
        self.host, self.port = self._server.host, self._server.port

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._server.close()

    # For the worker that serves it; named and behaving as torch's Store.

    def set(self, key: str, value: bytes) -> None:
        """Keep ``value`` under ``key``."""
        self._set(key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until there is one."""
        return self._get(key, _LONGEST_WAIT_SECONDS)

    def fetch(self, key: str, *, within_seconds: float) -> bytes:
        """As :meth:`get`, with a limit of its own. Raises TimeoutError when there is no value by then."""
        return self._get(key, within_seconds)

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` have a value."""
        return self._check(keys)

    def delete_key(self, key: str) -> bool:
        """Forget ``key``; whether it had a value."""
        return self._delete(key)

    def _serve(self, connection: socket.socket) -> None:
        frames = Frames(connection)
        while (request := self._next(frames)) is not None:
            try:
                answer = [True, self._answer(request)]
            except (MessageError, TimeoutError) as error:
                answer = [False, str(error)]
            frames.send(answer)

    @staticmethod
    def _next(frames: Frames) -> Any:
        """What the client asks next; None when it has gone, or says something that is no request."""
        try:
            return frames.receive()
        except MessageError as error:
            logger.warning("a client of the store was dropped: %s", error)
            return None

    def _answer(self, request: Any) -> Any:
        if type(request) is not list or not request or type(request[0]) is not str or request[0] not in self._calls:
            raise MessageError("a request to a store that names nothing it does")
        try:
            return self._calls[request[0]](*request[1:])
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MessageError(f"a request to a store that makes no sense ({error})") from error

    def _set(self, key: str, value: bytes) -> None:
        self._write(key, value)

    def _get(self, key: str, seconds: float) -> bytes:
        with self._changed:
            self._wait([key], seconds)
            return self._values[key]

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._write(key, str(total).encode())
            return total

    def _check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def _wait(self, keys: list[str], seconds: float) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._check(keys), min(float(seconds), _LONGEST_WAIT_SECONDS))
            if not there:
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"wait timeout after {seconds:.1f} s, keys: {', '.join(missing):.200}")

    def _swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As TCPStore: an absent key is taken for an empty expectation."""
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._write(key, desired)
            return self._values.get(key, expected)

    def _delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def _count(self) -> int:
        with self._changed:
            return len(self._values)

    def _append(self, key: str, value: bytes) -> None:
        with self._changed:
            self._write(key, self._values.get(key, b"") + value)

    def _write(self, key: str, value: bytes) -> None:
        if type(key) is not str or type(value) is not bytes:
            raise MessageError("a request to a store whose key is no text, or whose value is no bytes")
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
