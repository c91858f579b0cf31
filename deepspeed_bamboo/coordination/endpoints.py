"""Where etcd servers are, ``host:port`` or ``unix:/path``: how users write it, and errors for what can't be read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_bamboo.coordination.errors import EndpointError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_ADDRESS6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")


@dataclass(frozen=True)
class Endpoint:
    """One etcd server. Text form ``host:port``; an IPv6 address stands in brackets.

    One with a path for ``host`` listens on that Unix socket of this machine, and has ``port`` 0: ``unix:/path``.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"unix:{self.host}" if self.is_local else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is a Unix socket, which nobody on another machine can reach."""
        return self.host.startswith("/")

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read ``host:port``. Raises EndpointError naming the value, the rule and the remedy."""
        text = text.strip()
        if text.startswith("unix:/"):
            return cls(text.removeprefix("unix:"), 0)
        if "://" in text:
            bare = text.split("://", 1)[1].rstrip("/")
            raise EndpointError(f"endpoint {text!r} has a scheme; endpoints are host:port, so write {bare!r}")
        host, separator, port = text.rpartition(":")
        if not separator or not host:
            raise EndpointError(f"endpoint {text!r} has no port; write host:port, for example {text.strip(':')}:2379")
        if not port.isascii() or not port.isdigit() or len(port) > 5 or not 1 <= int(port) <= 65535:
            raise EndpointError(f"endpoint {text!r} has port {port!r}; a port is a number from 1 to 65535")
        if ":" in host and not _ADDRESS6.fullmatch(host):
            raise EndpointError(f"endpoint {text!r} has an IPv6 address; put it in brackets, as in [::1]:2379")
        if ":" not in host and not _HOST.fullmatch(host):
            raise EndpointError(f"endpoint {text!r} has host {host!r}, which is no host name or address")
        return cls(host, int(port))


def parse_endpoints(texts: Iterable[str]) -> tuple[Endpoint, ...]:
    """All of ``texts``, each once, in order. Raises EndpointError for a malformed one or for none at all."""
    endpoints = tuple(dict.fromkeys(Endpoint.parse(text) for text in texts))
    if not endpoints:
        raise EndpointError("no endpoint given; write at least one host:port")
    return endpoints
