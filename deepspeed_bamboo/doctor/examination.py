"""All checks, in the order in which a reader can act on what they find."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.builds import check_build_locks
from deepspeed_bamboo.doctor.clouds import check_cloud
from deepspeed_bamboo.doctor.coordinator import check_coordinator
from deepspeed_bamboo.doctor.finding import Check, Finding
from deepspeed_bamboo.doctor.gpus import check_gpus, check_nccl_settings
from deepspeed_bamboo.doctor.hosts import check_hosts, check_paths
from deepspeed_bamboo.doctor.losses import check_losses
from deepspeed_bamboo.doctor.memory import check_memory
from deepspeed_bamboo.doctor.network import check_network, check_secret
from deepspeed_bamboo.doctor.settings import check_settings
from deepspeed_bamboo.doctor.software import check_software
from deepspeed_bamboo.doctor.storage import check_storage
from deepspeed_bamboo.doctor.subject import Subject
from deepspeed_bamboo.doctor.system import check_system

CHECKS: tuple[Check, ...] = (
    check_software,
    check_gpus,
    check_nccl_settings,
    check_build_locks,
    check_system,
    check_network,
    check_secret,
    check_hosts,
    check_paths,
    check_settings,
    check_memory,
    check_losses,
    check_coordinator,
    check_cloud,
    check_storage,
)


def examine(subject: Subject) -> Iterator[Finding]:
    """Yields what the checks find, one after the other; nothing for a machine that is in order."""
    for check in CHECKS:
        yield from check(subject)
