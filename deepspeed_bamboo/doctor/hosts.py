"""Checks the hosts: unique names, unique addresses, and paths that all of them see."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.gpus import own_slots
from deepspeed_bamboo.doctor.subject import Subject

_SHOWN = 4
_OWN_TO_A_MACHINE = ("/tmp", "/dev/shm", "/var/tmp", "/run")


def check_hosts(subject: Subject) -> Iterator[Finding]:
    """Checks that each name is there once and has an address of its own, and that all have as many slots."""
    names = Counter(host.name for host in subject.hosts)
    for name, count in names.items():
        if count > 1:
            yield Finding(f"the host file names {name} {count} times", "name each machine once, with all its slots")
    by_address: dict[str, list[str]] = defaultdict(list)
    for name in names:
        address = subject.machine.resolve(name)
        by_address[address or ""].append(name)
    unknown = by_address.pop("", [])
    if unknown:
        yield Finding(
            f"{', '.join(unknown)}: unknown on this machine", "correct the host file, or make the names known (DNS)"
        )
    elif subject.hosts and own_slots(subject) is None:
        shown = ", ".join(sorted(names)[:_SHOWN]) + ("" if len(names) <= _SHOWN else " and others")
        yield warning(
            f"the host file names {shown}, and none of them is this machine ({subject.machine.host_name()})",
            "if it is to take part, correct its name there; else run this command on those that are",
        )
    for address, same in by_address.items():
        if len(same) > 1:
            yield Finding(
                f"hosts {', '.join(same)} are one machine ({address}): both would be lost at once",
                "name each machine once, with all its slots",
            )
    if len({host.slots for host in subject.hosts}) > 1:
        yield warning(
            "hosts have different numbers of slots", "give all the same number: losing the largest costs most"
        )
    node = subject.environment.get("BAMBOO_NODE")
    if node is not None and len(subject.hosts) > 1:
        yield warning(
            f"BAMBOO_NODE is {node!r}: exported to all machines, it makes one node of them",
            "unset it; the host's own name is used then",
        )


def check_paths(subject: Subject) -> Iterator[Finding]:
    """Checks files and folders that all machines must find at the same path."""
    if len(subject.hosts) < 2:
        return
    section = subject.section
    for setting, path in (("event_log", section.event_log), ("checkpoint.dir", section.checkpoint.dir)):
        if path is None or path.startswith("s3://"):
            continue
        if setting == "checkpoint.dir" and any(Path(path).is_relative_to(own) for own in _OWN_TO_A_MACHINE):
            yield Finding(
                f"{setting} is {path!r}, and each machine has a {Path(*Path(path).parts[:2])} of its own",
                "name a directory of a shared file system, or s3://bucket/prefix",
            )
