"""Slots that a scheduler starts by itself, without a launcher: what ``srun`` says, as launchers say it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deepspeed_bamboo.elastic.errors import LaunchError

_FIRST_PORT, _PORTS = 20000, 10000


def ranks_of_scheduler(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT of a task of ``srun``; else nothing.

    What is there already stays: a launcher inside of a task knows better. All tasks of a step find the same: the first
    of its nodes, and a port that depends on job and step. Raises LaunchError for what SLURM doesn't say so.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}  # SLURM_STEP_*: of tasks that srun starts, and not of a batch script, which is a task, too
    node = environment.get("SLURM_NODEID", "0")
    found = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks_of_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"), int(node))),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": str(_port(environment)),
    }
    return {name: value for name, value in found.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first of a list of hosts as SLURM writes it, ``gpu[07-09,12],login1``. Raises LaunchError if it is none."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?(?:,|$)", nodes)
    if found is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST is {nodes!r}, which is no list of nodes; set MASTER_ADDR to the first one"
        )
    prefix, number, suffix = (part or "" for part in found.groups())
    return prefix + number + suffix


def tasks_of_node(counts: str, node: int) -> int:
    """How many tasks node number ``node`` has by SLURM's list, ``4(x2),3``. Raises LaunchError if it says nothing."""
    for part in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            break
        times = int(found[2] or 1)
        if node < times:
            return int(found[1])
        node -= times
    raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, which says nothing of node {node}; start with srun")


def _port(environment: Mapping[str, str]) -> int:
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    return _FIRST_PORT + (31 * int(re.sub(r"\D", "", job) or 0) + int(re.sub(r"\D", "", step) or 0)) % _PORTS
