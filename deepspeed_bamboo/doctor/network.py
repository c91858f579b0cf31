"""Checks ports and interfaces of this machine, and variables of another launcher."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding
from deepspeed_bamboo.doctor.subject import Subject

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
    for variable in _LEFT_BEHIND:
        if variable in subject.environment:
            yield Finding(
                f"{variable} is set: workers would look for a store that torchrun serves", f"unset {variable}"
            )
