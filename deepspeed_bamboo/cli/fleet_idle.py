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
    part = {name for names in nodes.values() for name in names}
    # A younger one may be on its way into the job, or in it already.
    machines = {
        one.instance: one.names
        for one in status.machines
        if one.runs and (one.hours >= least_hours or not part.isdisjoint(one.names))
    }
    return without_part(machines, nodes)


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
