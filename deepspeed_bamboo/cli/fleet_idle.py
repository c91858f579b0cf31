"""Machines of a fleet that run, cost and take no part in its job: a wrong image or path, a refusal, a drain."""

from __future__ import annotations

from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.cloud.fleet_control import FleetStatus
from deepspeed_bamboo.core.presence import without_part

__all__ = ["idle_line", "idle_of"]

_IDLE_LOG = "/var/log/cloud-init-output.log"


def idle_of(status: FleetStatus, view: JobView | None, *, least_hours: float = 0.0) -> tuple[int, list[str]]:
    """How many machines that have run for so long take no part in the job, and which ones that may be."""
    nodes = {} if view is None else {node: {node, node.partition(".")[0]} for node in view.slots_of}
    for worker in () if view is None else view.workers:
        if worker.node in nodes:
            nodes[worker.node].add(worker.address)
    running = [machine for machine in status.machines if machine.runs]
    count, found = without_part({machine.instance: machine.names for machine in running}, nodes)
    young = {machine.instance for machine in running if machine.hours < least_hours}
    long = [name for name in found if name not in young]
    return min(count, len(long)), long


def idle_line(count: int, machines: list[str], status: FleetStatus, *, since: str = "") -> str:
    """What to say of ``count`` machines that take no part, which are among ``machines``."""
    if count == status.running:
        return (
            f"none of {count} running machines is seen in the job{since}, and they cost as ever; look at {_IDLE_LOG} "
            "on one of them"
        )
    which = ", ".join(machines) if count == len(machines) else "its nodes have other names, so which ones is not known"
    return (
        f"{count} of {status.running} machines have taken no part in the job{since}, and cost as the others do: "
        f"{which}; look at {_IDLE_LOG} there. AWS replaces those that you end in its console"
    )
