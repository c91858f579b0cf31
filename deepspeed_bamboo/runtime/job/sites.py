"""Where the workers of a job are, as placement wants it."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_bamboo.coordination import Member
from deepspeed_bamboo.core.placing.sites import WorkerSite, zones_of_nodes
from deepspeed_bamboo.runtime.job.news import Speaker, tell

_UNKNOWN_ZONE = "unknown"


def site_of(member: Member) -> WorkerSite:
    """Where a worker is, as it says itself; what those on its node say may differ (``in_agreed_zones``)."""
    return WorkerSite(member.worker, member.node, "" if member.zone == _UNKNOWN_ZONE else member.zone)


class Contradictions:
    """Says, once for each node, that workers on it name different zones."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._told: set[str] = set()

    def tell(self, sites: Iterable[WorkerSite]) -> None:
        """Where there is something new to say of ``sites``, from this worker."""
        for node, zones in zones_of_nodes(sites).items():
            if len(zones) > 1 and node not in self._told:
                self._told.add(node)
                tell(
                    self._speaker,
                    f"workers on node {node} are in zone {' and in zone '.join(zones)}, as they say, and a node is in "
                    "one, so stages are placed as if its zone were not known. Give each machine a BAMBOO_NODE of its "
                    "own, or all workers on this one the same BAMBOO_ZONE",
                )
