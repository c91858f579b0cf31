"""Checks shared memory and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_MIB = 1 << 20
_LEAST_SHARED_BYTES = 512 * _MIB  # containers have 64 MiB unless they are told otherwise


def check_system(subject: Subject) -> Iterator[Finding]:
    """Room in /dev/shm, where NCCL and data loaders exchange data, and a clock that something sets."""
    room = subject.machine.shared_memory_bytes()
    if room is not None and room < _LEAST_SHARED_BYTES and not subject.on_cpu:
        yield Finding(
            f"/dev/shm has {room // _MIB} MiB, and NCCL and data loaders exchange data there",
            "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
        )
    if subject.machine.clock_is_synchronised() is False and len(subject.hosts) > 1:
        yield warning(
            "no service sets this machine's clock: lines of several machines' logs are out of order, and a bucket "
            "refuses a clock that is wrong by minutes",
            "run chrony or systemd-timesyncd on all machines",
        )
