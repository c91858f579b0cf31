"""Where workers are: node and zone of each, the failure domains that placement keeps neighbours apart in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_bamboo.core.placement import WorkerId


class WorkerSite(NamedTuple):
    """A live worker, its node, and the node's zone; an empty zone means that it is not known."""

    worker: WorkerId
    node: str
    zone: str = ""


@dataclass(frozen=True)
class Sites:
    """The same, numbered: workers, nodes and zones by their position, in the order in which they were given.

    ``node`` and ``zone`` hold a number for every worker, ``zone_of_node`` one for every node. A node whose zone is
    not known is a zone of its own: all that is known to fail together is the node. One worker that knows it is enough.
    """

    workers: tuple[WorkerId, ...]
    node: tuple[int, ...]
    zone: tuple[int, ...]
    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    zone_of_node: tuple[int, ...]

    @classmethod
    def of(cls, sites: Iterable[WorkerSite]) -> Sites:
        """Number ``sites``. Raises ValueError for none, a doubled worker, a nameless node, a node in two zones."""
        given = tuple(sites)
        _refuse_unusable(given)
        zone_of = {node: "".join(zones) for node, zones in zones_of_nodes(given).items()}  # none or one
        keys = {name: _zone_key(name, zone) for name, zone in zone_of.items()}
        node_numbers = {name: number for number, name in enumerate(zone_of)}
        zone_numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
        return cls(
            workers=tuple(site.worker for site in given),
            node=tuple(node_numbers[site.node] for site in given),
            zone=tuple(zone_numbers[keys[site.node]] for site in given),
            nodes=tuple(node_numbers),
            zones=tuple(zone or f"unknown ({node})" for node, zone in zone_numbers),
            zone_of_node=tuple(zone_numbers[keys[name]] for name in node_numbers),
        )

    def __len__(self) -> int:
        return len(self.workers)

    def of_node(self, node: int) -> tuple[WorkerId, ...]:
        """The workers of a node."""
        return tuple(worker for worker, its in zip(self.workers, self.node, strict=True) if its == node)

    def of_zone(self, zone: int) -> tuple[WorkerId, ...]:
        """The workers of a zone."""
        return tuple(worker for worker, its in zip(self.workers, self.zone, strict=True) if its == zone)


def zones_of_nodes(given: Iterable[WorkerSite]) -> dict[str, tuple[str, ...]]:
    """The zones that the workers of each node name: none where no worker knows it, several where they disagree."""
    found: dict[str, dict[str, None]] = {}
    for site in given:
        known = found.setdefault(site.node, {})
        if site.zone:
            known[site.zone] = None
    return {node: tuple(zones) for node, zones in found.items()}


def in_agreed_zones(given: Iterable[WorkerSite]) -> list[WorkerSite]:
    """The same workers in the same order, those of a node all in the zone that one of them knows.

    Where they name several, two machines may have one name: then the node's zone counts as not known.
    """
    given = list(given)
    agreed = {node: zones[0] if len(zones) == 1 else "" for node, zones in zones_of_nodes(given).items()}
    return [site._replace(zone=agreed[site.node]) for site in given]


def _zone_key(node: str, zone: str) -> tuple[str, str]:
    """What tells zones apart: the name, or the node where there is none."""
    return ("", zone) if zone else (node, "")


def _refuse_unusable(given: Sequence[WorkerSite]) -> None:
    problem = next(_problems(given), None)
    if problem is not None:
        raise ValueError(problem)


def _problems(given: Sequence[WorkerSite]) -> Iterator[str]:
    if not given:
        yield "no workers; a placement needs at least one: wait for one, or start one"
    seen: set[WorkerId] = set()
    for site in given:
        if not site.worker or not site.node:
            yield f"{site!r} has no name of worker or node; give both (a machine of its own is its own node)"
        if site.worker in seen:
            yield f"worker {site.worker!r} is listed twice; list every worker once"
        seen.add(site.worker)
    for node, zones in zones_of_nodes(given).items():
        if len(zones) > 1:
            yield (
                f"node {node!r} is in zone {zones[0]!r} and in zone {zones[1]!r}; a node is in one zone: "
                "correct one of them, or give two machines two names"
            )
