"""Warnings at a job's start about its machines: those that count as one, and losses that it does not survive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from deepspeed_bamboo.coordination import AgentRecord, EpochRecord, Member
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.wording import numbered


def namesakes(agents: Mapping[int, AgentRecord]) -> list[str]:
    """A warning for each node name that several launchers or machines use: to the job they are one node.

    Agents that don't say where they run are left out.
    """
    groups: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, agent in sorted(agents.items()):
        if agent.machine:
            groups[agent.node][agent.machine, agent.launcher].append(rank)
    return [_of_namesakes(node, launchers) for node, launchers in sorted(groups.items()) if len(launchers) > 1]


def _of_namesakes(node: str, launchers: Mapping[tuple[str, int], Iterable[int]]) -> str:
    parties = " and ".join(numbered("rank", ranks) for ranks in launchers.values())
    machines = {machine.partition("/")[0] for machine, _ in launchers}
    where = "run on different machines that are all called" if len(machines) > 1 else "have launchers of their own on"
    return (
        f"{parties} {where} {node}, and count as one node: neighbours in the pipeline, and a stage and its shadow, may "
        "be on it together, so its loss may be fatal. To tell them apart give each launcher another BAMBOO_NODE"
    )


def not_survived(epoch: EpochRecord, members: Mapping[WorkerId, Member]) -> str | None:
    """Which nodes the job could not lose, though it could lose each of their workers; None when there are none."""
    nodes: dict[str, list[WorkerId]] = defaultdict(list)
    for worker in epoch.members:
        if worker in members:
            nodes[members[worker].node].append(worker)
    if any(epoch.placement.without([worker])[0] is None for worker in epoch.members):
        return None  # nothing is protected, which is said elsewhere
    fatal = [node for node, workers in sorted(nodes.items()) if epoch.placement.without(workers)[0] is None]
    if not fatal:
        return None
    if len(nodes) == 1:
        return (
            f"all {len(epoch.members)} workers are on node {fatal[0]}: the job survives the loss of a worker, but not "
            "of the node"
        )
    many = "the loss of any of these nodes" if len(fatal) > 1 else "the loss of this node"
    if epoch.goes_back:
        return (
            f"{many} would take the last live copy of a stage, since neighbours share it: {', '.join(fatal)}. The job "
            "then goes back to a checkpoint, in memory if that is on another node, or in checkpoint.dir; more nodes "
            "would change that"
        )
    return (
        f"{many} would end the job, since neighbours share it: {', '.join(fatal)} (with a checkpoint.dir it can "
        "continue from there); more nodes, or fewer stages on each, would change that"
    )
