"""The address under which other machines reach the workers of this machine, and on which it listens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

from deepspeed_bamboo.coordination import Endpoint
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.protocol import ADDRESS

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1"  # kept for documentation: the way to it is the way to everywhere


def advertised_address(environment: Mapping[str, str], *, master_addr: str, endpoints: Sequence[str]) -> str:
    """BAMBOO_ADDRESS if it is set; else that of the interface which leads to the master, or to the coordinator.

    A launcher of a single machine names loopback as its master; whether others can join from elsewhere
    is then decided by where the coordinator is. Nothing is sent, nobody is asked but the routing table.
    """
    if environment.get(ADDRESS):
        return _resolved(environment[ADDRESS], what=ADDRESS)
    servers = [Endpoint.parse(endpoint) for endpoint in endpoints]
    hosts = [master_addr, *(server.host.strip("[]") for server in servers if not server.is_local)]
    found = [_interface_to(host) for host in hosts]
    return next((address for address in found if address and not _is_loopback(address)), _LOOPBACK)


def listening_address(master_addr: str, *, environment: Mapping[str, str]) -> str:
    """The own address of rank 0's machine on which others of the job find it under ``master_addr``.

    That address itself if it is one of this machine's; else BAMBOO_ADDRESS; else that of the interface which leads to
    other machines: a machine's own name is loopback to itself on many. Raises LaunchError for a name that nobody knows.
    """
    resolved = _resolved(master_addr)
    literal = _is_literal(master_addr)
    own = own_addresses()
    if resolved in own and (literal or not _is_loopback(resolved)):
        return resolved
    if _is_loopback(resolved) and literal:
        return resolved
    return environment.get(ADDRESS) or _interface_to(_ANYWHERE) or resolved


def reached_at(master_addr: str) -> str:
    """Where a slot finds rank 0 under ``master_addr``: on rank 0's own machine not at loopback, if that is a name."""
    try:
        resolved = _resolved(master_addr)
    except LaunchError:
        return master_addr  # the attempt to connect will say why
    if _is_loopback(resolved) and not _is_literal(master_addr):
        return _interface_to(_ANYWHERE) or resolved
    return resolved


def check_own_address(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if the user names an address or an interface that this machine does not have."""
    address, interfaces = environment.get(ADDRESS), psutil.net_if_addrs()
    if address and _resolved(address, what=ADDRESS) not in own_addresses():
        raise LaunchError(
            f"{ADDRESS} is {address!r}, which is no address of this machine; it has "
            f"{', '.join(sorted(own_addresses()))}. Name the one under which the job's other machines reach this one, "
            "or unset it"
        )
    for variable in (GLOO_VARIABLE, NCCL_VARIABLE):
        name = environment.get(variable, "").split(",")[0].strip()
        if variable == NCCL_VARIABLE and name[:1] in "^=":
            continue  # NCCL's own language
        known = any(own.startswith(name) if variable == NCCL_VARIABLE else own == name for own in interfaces)
        if name and not known:
            raise LaunchError(
                f"{variable} is {environment[variable]!r}, and this machine has no interface {name!r}; it has "
                f"{', '.join(sorted(interfaces))}. Name one of them, or leave the variable out"
            )


def own_addresses() -> frozenset[str]:
    """Every IP address of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [known for addresses in psutil.net_if_addrs().values() for known in addresses if known.family in families]
    return frozenset(known.address.partition("%")[0] for known in found)


def interfaces_of(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """The variables that make gloo use the interface with ``address``, and NCCL too if that is loopback.

    Without those that the user has set, and empty where there is no such interface. By default gloo takes what the
    machine's own name resolves to, on many of them loopback; NCCL takes any other than loopback.
    """
    interfaces = psutil.net_if_addrs().items()
    found = sorted(name for name, addresses in interfaces if any(known.address == address for known in addresses))
    variables = (GLOO_VARIABLE, NCCL_VARIABLE) if _is_loopback(address) else (GLOO_VARIABLE,)
    return {variable: found[0] for variable in variables if found and not environment.get(variable)}


def _resolved(host: str, *, what: str = "the launcher's --master_addr") -> str:
    try:
        return str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"address {host!r} cannot be resolved ({error}); check {what}") from error


def _interface_to(host: str) -> str:
    """The own address on the way to ``host``; empty when there is no way or no such host."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_literal(host: str) -> bool:
    """Whether it means loopback by itself, and not because of what this machine's tables say."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
