"""The settings of an agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed_bamboo.elastic.notices import NoticePlan
from deepspeed_bamboo.elastic.rules import Rules


def _nothing() -> None:
    return


@dataclass(frozen=True)
class AgentSettings:
    """``lease_seconds``: coordinator.lease_seconds. ``hosts_coordinator``: others need this agent's etcd.

    ``launchers``: the processes without which the agent ends (see ``launcher_chain``).
    ``notices``: for the first agent of a node: the source of warnings that the node is about to be taken.
    ``compact_seconds``: how often etcd's history is compacted; None: never by this job.
    ``environment``: further variables for workers (how to reach a guarded etcd, for instance).
    """

    lease_seconds: float = 3.0
    hosts_coordinator: bool = False
    launchers: tuple[int, ...] = ()
    rules: Rules = field(default_factory=Rules)
    environment: tuple[tuple[str, str], ...] = ()
    notices: NoticePlan | None = None
    compact_seconds: float | None = None


@dataclass(frozen=True)
class AgentHooks:
    """Called once this agent is known to the job, and once every slot's agent is (maybe from another thread)."""

    on_registered: Callable[[], None] = _nothing
    on_all_present: Callable[[], None] = _nothing
