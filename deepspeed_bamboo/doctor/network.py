"""Checks ports, interfaces, address and secret of this machine, and variables of another launcher."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding
from deepspeed_bamboo.doctor.subject import Subject
from deepspeed_bamboo.protocol import ADDRESS

_DEFAULT_PORT = "29500"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LEFT_BEHIND = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


def check_network(subject: Subject) -> Iterator[Finding]:
    """Checks that the launcher's port is free, named interfaces exist, and torchrun left no variables."""
    port = subject.environment.get("MASTER_PORT", _DEFAULT_PORT)
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        yield Finding(f"MASTER_PORT is {port!r}", "set it to a number from 1 to 65535, or unset it")
    elif not subject.machine.port_is_free(int(port)):
        yield Finding(
            f"port {port}, where the launcher's master listens, is in use",
            "end what uses it, or give the launcher another --master_port",
        )
    known = subject.machine.interfaces()
    for variable in _INTERFACES:
        wanted = subject.environment.get(variable, "")
        names = [name for name in wanted.lstrip("^=").split(",") if name]
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in names if not wanted.startswith("^") else []:
            if not any(there == name or (not exact and there.startswith(name)) for there in known):
                yield Finding(
                    f"{variable} names {name!r}, and this machine has {', '.join(sorted(known))}",
                    f"unset {variable}, or name an interface that all machines have",
                )
    yield from _own_address(subject)
    for variable in _LEFT_BEHIND:
        if variable in subject.environment:
            yield Finding(
                f"{variable} is set: workers would look for a store that torchrun serves", f"unset {variable}"
            )


def check_secret(subject: Subject) -> Iterator[Finding]:
    """Checks the file of the secret that machines share; where there is none, a job makes it."""
    problem = subject.machine.secret_problem(subject.environment)
    if problem is not None:
        what, _, remedy = problem.rpartition("; ")
        yield Finding(what, remedy)


def _own_address(subject: Subject) -> Iterator[Finding]:
    given = subject.environment.get(ADDRESS)
    if not given:
        return
    own = subject.machine.addresses()
    resolved = given if given in own else subject.machine.resolve(given)
    if resolved not in own:
        yield Finding(
            f"{ADDRESS} is {given!r}, which is no address of this machine; it has {', '.join(sorted(own))}",
            "name the one under which the other machines reach this one, or unset it",
        )
    elif len(subject.hosts) > 1 and ipaddress.ip_address(resolved).is_loopback:
        yield Finding(
            f"{ADDRESS} is {given!r}, where other machines don't reach this one, and there are {len(subject.hosts)}",
            "name the address that they reach, or unset it",
        )
