"""Versions of what is installed, and of NCCL those that are known to hang."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deepspeed_bamboo.coordination.errors import ServerStartError
from deepspeed_bamboo.coordination.server import find_etcd
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

Version = tuple[int, ...]

# Package, the least version that works, the last that was tried, and the first that is refused. As in setup.py.
NEEDED: tuple[tuple[str, Version, Version, Version], ...] = (
    ("torch", (2, 11), (2, 13), (2, 15)),
    ("deepspeed", (0, 19, 8), (0, 19, 8), (0, 20)),
)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_BAD_NCCL = (((2, 25, 1), (2, 25, 1)), ((2, 28, 3), (2, 28, 8)))  # first and last


def check_software(subject: Subject) -> Iterator[Finding]:
    """Python, torch, DeepSpeed, NCCL, and etcd where the job starts its own."""
    machine = subject.machine
    if machine.python() < (3, 10):
        yield Finding(f"Python is {_text(machine.python())}", "use Python 3.10 or later")
    for package, least, tried, too_new in NEEDED:
        found = machine.version(package)
        wanted = f"{_text(least)} or later, below {_text(too_new)}"
        remedy = f"install {package} {wanted}"
        if found is None:
            yield Finding(f"{package} is not installed", remedy)
        elif not least <= _numbers(found) < too_new:
            yield Finding(f"{package} is {found}, and {wanted} is needed", remedy)
        elif _numbers(found)[: len(tried)] > tried:
            yield warning(
                f"{package} is {found}, and this version of the plugin was tried with {_text(tried)} at most",
                "a job checks at its start that all is there that it needs; for what was tried: "
                f"pip install '{package}=={_text(tried)}{'.*' if len(tried) < 3 else ''}'",
            )
    for package in _NCCL_PACKAGES:
        found = machine.version(package)
        if found is not None and any(first <= _numbers(found) <= last for first, last in _BAD_NCCL):
            yield Finding(
                f"{package} is {found}, which can hang when a connection is given up",
                f"pip install '{package}>=2.28.9', or a version before 2.25.1",
            )
    yield from _own_etcd(subject)


def _own_etcd(subject: Subject) -> Iterator[Finding]:
    if subject.section.coordinator.endpoints:
        return
    try:
        find_etcd()
    except ServerStartError as error:
        yield Finding("coordinator.endpoints is empty, so the job starts an etcd of its own", str(error))
    if len(subject.hosts) > 1:
        yield warning(
            f"coordinator.endpoints is empty: etcd runs on {subject.hosts[0].name}, and the job ends with that machine",
            "name an etcd on machines that stay in coordinator.endpoints",
        )


def _numbers(version: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _text(version: Version) -> str:
    return ".".join(map(str, version))
