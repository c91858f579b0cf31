"""The first agent's line before training: the plugin is active, and how to watch the job."""

from __future__ import annotations

import shlex

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.wording import numbered


def greeting(boot: Boot, slot: Slot, config: BambooConfig, *, source: str | None) -> str:
    """One line. ``source``: the DeepSpeed JSON, which a command for a guarded etcd must name."""
    coordinator = config.coordinator
    if boot.ranks:
        here = boot.ranks[: slot.local_world_size]  # those of rank 0, which says this, and its neighbours
        who = f"{_count(len(here), 'worker')} of this command will join it, as {numbered('rank', here)}"
        if len(here) < len(boot.ranks):
            who += f" (started elsewhere, its others join as {numbered('rank', boot.ranks[len(here) :])})"
    else:
        standbys = slot.world_size - slot.workers
        who = _count(slot.workers, "worker") + (f" and {_count(standbys, 'stand-by')}" if standbys else "")
    status = f"ds_bamboo status --job {shlex.quote(boot.job)}"
    if coordinator.username or coordinator.ca_cert or coordinator.prefix != type(coordinator)().prefix:
        status += f" --deepspeed_config {shlex.quote(source or 'FILE')}"
    elif coordinator.endpoints:
        status += f" --endpoints {','.join(coordinator.endpoints)}"
    parts = [
        f"job {boot.job}: {who}",
        f"redundancy {config.redundancy.mode}",
        f"{'etcd' if coordinator.endpoints else 'its own etcd'} at {', '.join(boot.endpoints)}",
        *([f"event log in {config.event_log}"] if config.event_log else []),
    ]
    return f"{'; '.join(parts)}. See it with: {status}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
