"""Questions to a metadata service: bounded in time and size, stoppable, without proxies or redirects.

``http.client`` knows neither proxies nor redirects, which is right here: a metadata service is always
next door, and what answers through a proxy is not it.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.errors import ConfigError

_MAXIMUM_BYTES = 256 * 1024
_CONNECT_SECONDS = 0.5  # the service is on this machine's own link
_LOOK_UP_SECONDS = 0.2  # how often a waiting request looks whether it is to stop


@dataclass(frozen=True)
class Answer:
    """``headers`` have lower-case names. ``asked_at_seconds``: ``time.monotonic()`` when the question left."""

    status: int
    headers: Mapping[str, str]
    text: str
    asked_at_seconds: float

    def json_object(self, what: str) -> dict[str, Any]:
        """The body as a JSON object. Raises MetadataError, naming ``what``, for anything else."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            raise MetadataError(f"{what} is no JSON", answered=True) from None
        if not isinstance(value, dict):
            raise MetadataError(f"{what} is no JSON object", answered=True)
        return value


class MetadataClient:
    """Asks one service. Every question opens its own connection, so nothing stale is ever reused."""

    def __init__(self, base_url: str) -> None:
        """``base_url``: ``http://host[:port]``, without a path. Raises ConfigError for anything else."""
        self._host, self._port = _split(base_url)

    def ask(
        self,
        path: str,
        *,
        stop: Event,
        timeout_seconds: float,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer, whatever its status; redirects are answers too.

        Raises MetadataError when there is none within ``timeout_seconds`` in all, when it breaks off,
        is longer than 256 KiB or no HTTP, and within about 0.2 s (0.5 s while connecting) of ``stop``.
        """
        patience = _Patience(stop, timeout_seconds)
        asked_at_seconds = time.monotonic()
        connection = _Connection(self._host, self._port, patience=patience)
        try:
            connection.request(method, path, headers={"Connection": "close", **(headers or {})})
            response = connection.getresponse()
            body = response.read(_MAXIMUM_BYTES + 1)
            if len(body) > _MAXIMUM_BYTES:
                raise MetadataError(f"{method} {path}: the answer is longer than 256 KiB", answered=True)
            if response.length:
                raise MetadataError(f"{method} {path}: the answer breaks off", answered=True)
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, body.decode("utf-8", errors="replace"), asked_at_seconds)
        except TimeoutError:
            raise MetadataError(f"{method} {path}: no answer within {timeout_seconds:g} s") from None
        except OSError as error:
            raise MetadataError(f"{method} {path}: {error.strerror or type(error).__name__}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise MetadataError(
                f"{method} {path}: the answer is no HTTP ({type(error).__name__})", answered=True
            ) from error
        finally:
            connection.close()


class _Patience:
    """How long a request may still wait."""

    def __init__(self, stop: Event, timeout_seconds: float) -> None:
        self._stop = stop
        self._end_seconds = time.monotonic() + timeout_seconds

    def next_wait_seconds(self, longest_seconds: float) -> float:
        """The next wait before looking again. Raises TimeoutError when stopped or out of time."""
        left = self._end_seconds - time.monotonic()
        if self._stop.is_set() or left <= 0:
            raise TimeoutError
        return min(left, longest_seconds)


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, *, patience: _Patience) -> None:
        super().__init__(host, port)
        self._patience = patience

    def connect(self) -> None:
        wait_seconds = self._patience.next_wait_seconds(_CONNECT_SECONDS)
        self.sock = _PatientSocket(
            socket.create_connection((self.host, self.port), timeout=wait_seconds), patience=self._patience
        )


class _PatientSocket(socket.socket):
    """A socket whose every read counts against one time limit; a timeout per read would let bytes trickle for ever."""

    def __init__(self, connected: socket.socket, *, patience: _Patience) -> None:
        super().__init__(connected.family, connected.type, connected.proto, fileno=connected.detach())
        self._patience = patience
        self.settimeout(patience.next_wait_seconds(_CONNECT_SECONDS))

    def recv_into(self, *arguments: Any, **named: Any) -> int:
        while True:
            self.settimeout(self._patience.next_wait_seconds(_LOOK_UP_SECONDS))
            try:
                return super().recv_into(*arguments, **named)
            except TimeoutError:
                continue


def _split(base_url: str) -> tuple[str, int]:
    """Host and port of a base address."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urllib.parse.urlsplit("")
    if not host or parts.scheme != "http" or parts.path.strip("/") or parts.query:
        raise ConfigError(
            f"metadata address {base_url!r} can't be used; a base address is http://host or http://host:port, "
            "as in http://169.254.169.254"
        )
    return host, port or 80
