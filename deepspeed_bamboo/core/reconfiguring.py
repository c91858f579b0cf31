"""Reconfiguration: which workers take part from the next iteration on, and who hosts what then (architecture 6).

A pure decision that one worker makes for all: from who is there, who wants to join and who has to leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.balance import balance
from deepspeed_bamboo.core.placing.holding import Memory
from deepspeed_bamboo.core.placing.lower_bound import count_pairs
from deepspeed_bamboo.core.placing.shadowing import with_all_shadows, without_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite, in_agreed_zones
from deepspeed_bamboo.core.placing.solver import decide
from deepspeed_bamboo.core.timing import Profile, iteration_seconds

# Stages move for the sake of balance alone if that saves so much of an iteration, and pays for the move in so many.
LEAST_GAIN = 0.03
_PAID_BACK_ITERATIONS = 100
_MOVE_SECONDS = 0.5
_SHOWN_MOVES = 6


@dataclass(frozen=True)
class Target:
    """What a reconfiguration leads to. ``joining`` are new among ``members``; ``leaving`` are not among them."""

    members: tuple[WorkerId, ...]
    joining: tuple[WorkerId, ...]
    leaving: tuple[WorkerId, ...]
    placement: Placement
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {
            "members": list(self.members),
            "joining": list(self.joining),
            "leaving": list(self.leaving),
            "placement": self.placement.to_json(),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Target:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        return cls(
            members=tuple(value["members"]),
            joining=tuple(value["joining"]),
            leaving=tuple(value["leaving"]),
            placement=Placement.from_json(value["placement"]),
            reason=value["reason"],
        )


@dataclass(frozen=True)
class Transfer:
    """State of ``coordinate`` that goes from ``source``, its owner, to ``destination``, who has none of it."""

    coordinate: Coordinate
    source: WorkerId
    destination: WorkerId


def next_target(
    placement: Placement,
    *,
    members: Sequence[WorkerSite],
    joining: Sequence[WorkerSite] = (),
    draining: Collection[str] = (),
    protected: bool = True,
    rearrange: bool = False,
    profile: Profile | None = None,
    micro_batches: int = 1,
    look: bool = False,
    memory: Memory | None = None,
) -> Target | None:
    """What to change at the next iteration boundary, or None when everything is as it should be.

    Args:
        placement: the current one.
        members: the workers that take part, in their order; one whose node is in ``draining`` leaves. Each says its
            zone for itself: one that doesn't know it is where the others of its node are.
        joining: workers that want to take part. Those on a draining node are left waiting.
        draining: nodes to be emptied. When no worker would be left, nobody leaves: training where a node may
            vanish beats not training.
        protected: False for no shadows.
        rearrange: also change owners only to separate neighbours better. Otherwise owners change when workers
            come or leave, or stand by while others host more than their share.
        profile: what is measured of stages and workers, if it is. Then, where some host several stages or are slow,
            the time of an iteration of ``micro_batches`` decides (``placing/balance.py``).
        look: whether the time decides now, though nobody comes or leaves: after a loss, or when another profile says
            so. Owners change if that pays; else shadows do if a node or a zone would take fewer with their owners.
        memory: what stages take on devices; what a worker can't hold is never chosen, so that everything stays.
    """
    agreed = in_agreed_zones((*members, *joining))
    members, joining = agreed[: len(members)], agreed[len(members) :]
    staying, new, leaving = _who_stays(members, joining, draining)
    sites = (*staying, *new)
    if profile is not None and (len(sites) < len(placement.grid) or profile.speeds):
        if not (leaving or new or look):
            return None
        return _by_time(
            placement,
            staying,
            new,
            leaving,
            profile=profile,
            micro_batches=micro_batches,
            protected=protected,
            memory=memory,
        )
    return _by_count(placement, members, staying, new, leaving, protected=protected, rearrange=rearrange)


def _who_stays(
    members: Sequence[WorkerSite], joining: Sequence[WorkerSite], draining: Collection[str]
) -> tuple[tuple[WorkerSite, ...], tuple[WorkerSite, ...], tuple[WorkerId, ...]]:
    """Who stays, who comes, and who leaves."""
    leaving = tuple(site.worker for site in members if site.node in draining)
    new = tuple(site for site in joining if site.node not in draining)
    staying = tuple(site for site in members if site.worker not in leaving)
    return (staying, new, leaving) if staying or new else (tuple(members), (), ())


def _by_count(
    placement: Placement,
    members: Sequence[WorkerSite],
    staying: tuple[WorkerSite, ...],
    new: tuple[WorkerSite, ...],
    leaving: tuple[str, ...],
    *,
    protected: bool,
    rearrange: bool,
) -> Target | None:
    """The target where stages are shared out by their number."""
    sites = (*staying, *new)
    uneven = _most_hosted(placement) > -(-len(placement.grid) // len(sites))
    if not (leaving or new or uneven or rearrange):
        return None
    decision = decide(placement.grid, sites, current=placement, protected=protected and len(sites) > 1)
    if not (leaving or new):
        same = decision.placement.owners == placement.owners
        numbered = Sites.of(members)
        pairs = count_pairs(placement.grid, placement.owners, numbered)
        better = (decision.pairs.node, decision.pairs.zone) < (pairs.node, pairs.zone)
        safer = rearrange and _lost_with_a_node(decision.placement, members) < _lost_with_a_node(placement, members)
        if not safer and (same or not (uneven or better)):
            return None
    names = tuple(site.worker for site in new)
    return Target(
        members=tuple(site.worker for site in sites),
        joining=names,
        leaving=leaving,
        placement=decision.placement,
        reason=_reason(joining=names, leaving=leaving, uneven=uneven),
    )


def _by_time(
    placement: Placement,
    staying: Sequence[WorkerSite],
    new: Sequence[WorkerSite],
    leaving: tuple[WorkerId, ...],
    *,
    profile: Profile,
    micro_batches: int,
    protected: bool,
    memory: Memory | None,
) -> Target | None:
    sites = (*staying, *new)
    found = balance(
        placement.grid,
        sites,
        profile=profile,
        micro_batches=micro_batches,
        current=placement,
        protected=protected,
        memory=memory,
    )
    if not found.fits:
        return None
    now = iteration_seconds(placement, profile, micro_batches=micro_batches)
    gain = now - found.seconds
    names = tuple(site.worker for site in new)
    if not (leaving or new) and (gain < LEAST_GAIN * now or gain * _PAID_BACK_ITERATIONS < _MOVE_SECONDS):
        return _with_safer_shadows(placement, staying, found=found.placement, roomy=memory is None)
    came = (
        _reason(joining=names, leaving=leaving, uneven=False) if new or leaving else _moved(placement, found.placement)
    )
    return Target(
        members=tuple(site.worker for site in sites),
        joining=names,
        leaving=leaving,
        placement=found.placement,
        reason=f"{came}; passes of an iteration are expected to take {found.seconds:.3g} s, {now:.3g} s before",
    )


def _with_safer_shadows(
    placement: Placement, members: Sequence[WorkerSite], *, found: Placement, roomy: bool
) -> Target | None:
    """The same owners with shadows of which a node or a zone takes fewer with their owners; None where none are.

    After a loss shadows are made again wherever that is quickest. ``found`` is what the time says; ``roomy``: devices
    have room for any shadow, else only those of ``found`` are known to fit.
    """
    if found.owners != placement.owners:
        if not roomy or not placement.shadows:
            return None
        bare = without_shadows(
            placement.grid, dict(placement.owners), current=placement, alike=placement.alike, copies=placement.copies
        )
        found = with_all_shadows(bare, Sites.of(members), held=placement.all_copies())
    if _lost_with_a_node(found, members) >= _lost_with_a_node(placement, members):
        return None
    return Target(
        members=tuple(site.worker for site in members),
        joining=(),
        leaving=(),
        placement=found,
        reason="shadows leave the nodes and zones of their owners",
    )


def is_safer(after: Placement, before: Placement, members: Sequence[WorkerSite]) -> bool:
    """Whether the loss of a node or a zone takes fewer owners with their shadows after a change than before it.

    ``members`` has whoever takes part in one of them.
    """
    return _lost_with_a_node(after, members) < _lost_with_a_node(before, members)


def transfers(before: Placement, after: Placement) -> tuple[Transfer, ...]:
    """The state that has to move, in grid order, owners first. Whoever holds a replica already gets nothing."""
    result: list[Transfer] = []
    had, wanted = before.all_copies(), after.all_copies()
    for coordinate, holders in had.items():
        for destination in wanted[coordinate]:
            if destination not in holders:
                result.append(Transfer(coordinate, holders[0], destination))
    return tuple(result)


def _lost_with_a_node(placement: Placement, members: Sequence[WorkerSite]) -> tuple[int, ...]:
    """How many coordinates have owner and shadow on one node, then in one zone, whose loss therefore takes both.

    With two shadows: how many have all three there, then how many nodes, then zones, these are short of three each.
    """
    nodes = {site.worker: site.node for site in members}
    zones = {site.worker: site.zone or site.node for site in members}
    if placement.copies == 1:
        pairs = [(placement.owner(c), shadow) for c, shadow in placement.shadows]
        return tuple(sum(its.get(owner) == its.get(shadow) for owner, shadow in pairs) for its in (nodes, zones))
    where = [
        [len({its.get(holder) for holder in holders}) for its in (nodes, zones)]
        for holders in placement.all_copies().values()
    ]
    return (
        sum(in_nodes == 1 for in_nodes, _ in where),
        sum(3 - in_nodes for in_nodes, _ in where),
        sum(3 - in_zones for _, in_zones in where),
    )


def _most_hosted(placement: Placement) -> int:
    owners = [worker for _, worker in placement.owners]
    return max(owners.count(worker) for worker in set(owners))


def _moved(before: Placement, after: Placement) -> str:
    """Which stages go where for speed."""
    moves = [f"{c} to {after.owner(c)}" for c in after.grid if after.owner(c) != before.owner(c)]
    more = f" and {len(moves) - _SHOWN_MOVES} more" if len(moves) > _SHOWN_MOVES else ""
    return f"moved to share the work better: {', '.join(moves[:_SHOWN_MOVES]) or 'shadows only'}{more}"


def _reason(*, joining: tuple[WorkerId, ...], leaving: tuple[WorkerId, ...], uneven: bool) -> str:
    parts = []
    if joining:
        parts.append(f"joined: {', '.join(joining)}")
    if leaving:
        parts.append(f"drained: {', '.join(leaving)}")
    if not parts:
        parts.append("work for a worker that stood by" if uneven else "neighbours further apart")
    return "; ".join(parts)
