"""Under which address the workers of this machine are reached by those of others."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import psutil

from deepspeed_bamboo.protocol import ADDRESS

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


def advertised_address(environment: Mapping[str, str], *, master_addr: str, endpoints: Sequence[str]) -> str:
    """BAMBOO_ADDRESS if it is set; else that of the interface which leads to the master, or to the coordinator.

    A launcher of a single machine names loopback as its master; whether others can join from elsewhere
    is then decided by where the coordinator is. Nothing is sent, nobody is asked but the routing table.
    """
    if environment.get(ADDRESS):
        return environment[ADDRESS]
    hosts = [master_addr, *(endpoint.rpartition(":")[0].strip("[]") for endpoint in endpoints)]
    found = [_interface_to(host) for host in hosts]
    return next((address for address in found if address and not _is_loopback(address)), _LOOPBACK)


def gloo_interface(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """What tells gloo to use the interface with ``address``; empty when the user has told it, or there is none.

    Left alone, gloo takes whatever the machine's own name resolves to, on many of them loopback.
    """
    if environment.get(GLOO_VARIABLE):
        return {}
    interfaces = psutil.net_if_addrs().items()
    found = sorted(name for name, addresses in interfaces if any(known.address == address for known in addresses))
    return {GLOO_VARIABLE: found[0]} if found else {}


def _interface_to(host: str) -> str:
    """The own address on the way to ``host``; empty when there is no way or no such host."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
