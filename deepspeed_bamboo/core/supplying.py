"""Who sends whom the data of a pipeline's ends, where not every worker has an iterator. Pure.

DeepSpeed wants data on first and last stages only. A worker that takes such a stage over and has no data of its own
gets the inputs, or the labels, of each micro-batch from one that has: as long as one is left.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId

Table = Mapping[WorkerId, Container[int]]
"""The pipelines that each worker has the data of."""


@dataclass(frozen=True)
class Claim:
    """What a worker says of its data when workers have come.

    ``own``: the pipelines that it has the data of; ``known``: the workers that it knew before; ``first``: by pipeline a
    checksum of the coming step's first micro-batch, where that is from an iterator; ``several``: its script has passed
    more than one iterator; ``guesses``: it came late, in a loop by the job's step, so its iterator's place is a guess;
    ``exchanges``: its script has sent or received messages between ranks.
    """

    own: tuple[int, ...]
    known: tuple[WorkerId, ...]
    first: Mapping[int, int]
    several: bool = False
    guesses: bool = False
    exchanges: bool = False

    def to_json(self) -> tuple[object, ...]:
        """As values that can be sent."""
        return self.own, self.known, dict(self.first), self.several, self.guesses, self.exchanges

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Claim:
        """Inverse of :meth:`to_json`."""
        own, known, first, several, guesses, exchanges = value
        return cls(tuple(own), tuple(known), dict(first), bool(several), bool(guesses), bool(exchanges))


def trusted(claims: Mapping[WorkerId, Claim]) -> dict[WorkerId, tuple[int, ...]]:
    """The pipelines that each worker has the data of, without those that have come with other data than the rest.

    A newcomer's iterator is where the others' are if it yields the same micro-batch now. If its place is a guess, that
    proves nothing where scripts pass one iterator after the other: the next one may begin at another step.
    """
    before = {worker for claim in claims.values() for worker in claim.known}
    old = [claim for worker, claim in claims.items() if worker in before]
    several = any(claim.several for claim in old)
    table = {}
    for worker, claim in claims.items():
        kept = claim.own
        if old and worker not in before:
            kept = tuple(p for p in kept if _agrees(claim, p, [its.first[p] for its in old if p in its.first], several))
        table[worker] = kept
    return table


def unlike(claims: Mapping[WorkerId, Claim]) -> dict[int, tuple[WorkerId, WorkerId]]:
    """By pipeline two workers whose iterators begin with different micro-batches, where there are two."""
    found: dict[int, tuple[WorkerId, WorkerId]] = {}
    first: dict[int, WorkerId] = {}
    for worker, claim in claims.items():
        for pipeline, checksum in claim.first.items():
            other = first.setdefault(pipeline, worker)
            if claims[other].first[pipeline] != checksum:
                found.setdefault(pipeline, (other, worker))
    return found


def _agrees(claim: Claim, pipeline: int, others: Sequence[int], several: bool) -> bool:
    if not others:
        return True  # nobody else has it, or all make it from the step
    return not (claim.guesses and several) and claim.first.get(pipeline, others[0]) in others


@dataclass(frozen=True)
class Delivery:
    """``feeder`` sends ``receiver`` what the ends of ``pipeline`` need of every micro-batch: inputs, labels or both."""

    feeder: WorkerId
    receiver: WorkerId
    pipeline: int
    inputs: bool
    labels: bool


def is_end(coordinate: Coordinate, placement: Placement) -> bool:
    """Whether it is a first or last stage, which needs data."""
    return coordinate.stage in (0, placement.grid.stages - 1)


def feeders(pipeline: int, table: Table, *, members: Sequence[WorkerId]) -> list[WorkerId]:
    """The members that have the data of ``pipeline``, in their order."""
    return [worker for worker in members if pipeline in table.get(worker, ())]


def by_iterator_first(
    iterators: Table, table: Table, *, pipelines: int, members: Sequence[WorkerId]
) -> dict[WorkerId, frozenset[int]]:
    """``table``, but of a pipeline that a member's iterator has the data of only such members count.

    One iterator may serve many evaluations, or several sets in turn; what a factory makes for an end of the same
    pipeline need not be the same.
    """
    chosen = {p: iterators if feeders(p, iterators, members=members) else table for p in range(pipelines)}
    return {w: frozenset(p for p, its in chosen.items() if p in its.get(w, ())) for w in members}


def deliveries(
    placement: Placement, table: Table, *, members: Sequence[WorkerId], beforehand: bool
) -> tuple[Delivery, ...]:
    """What has to be sent in every iteration, in an order that is the same everywhere.

    ``beforehand``: holders of shadows compute with them before anything is lost. Raises LookupError, with the
    coordinate, for a stage that nobody has the data of.
    """
    needs: dict[tuple[WorkerId, int], set[int]] = {}
    shadows = placement.shadows if beforehand else ()
    for coordinate, worker in (*placement.owners, *shadows):
        if is_end(coordinate, placement) and coordinate.pipeline not in table.get(worker, ()):
            needs.setdefault((worker, coordinate.pipeline), set()).add(coordinate.stage)
    result = []
    for (worker, pipeline), stages in sorted(needs.items()):
        found = feeders(pipeline, table, members=members)
        if not found:
            raise LookupError(Coordinate(pipeline, min(stages)))
        last = placement.grid.stages - 1
        result.append(Delivery(found[0], worker, pipeline, inputs=0 in stages, labels=last in stages))
    return tuple(result)


def read_with_messages(
    placement: Placement, claims: Mapping[WorkerId, Claim]
) -> Iterator[tuple[Coordinate, WorkerId, WorkerId]]:
    """The ends whose owner's script reads data and exchanges messages, with owner and holder of the shadow.

    Of those only whose holder's script does neither: it would begin to read after a loss, when messages of before are
    gone.
    """
    for coordinate, holder in placement.shadows:
        owner = placement.owner(coordinate)
        reads, idle = claims.get(owner), claims.get(holder)
        if not is_end(coordinate, placement) or reads is None or idle is None:
            continue
        active = reads.exchanges and coordinate.pipeline in reads.own
        if active and not idle.exchanges and coordinate.pipeline not in idle.own:
            yield coordinate, owner, holder


def unsafe_ends(placement: Placement, table: Table, *, members: Sequence[WorkerId]) -> Iterator[Coordinate]:
    """The ends whose owner is the only one with their data, though another worker is to stand in for it."""
    for coordinate, holder in placement.shadows:
        if is_end(coordinate, placement):
            others = [
                w for w in feeders(coordinate.pipeline, table, members=members) if w != placement.owner(coordinate)
            ]
            if not others and holder in members:
                yield coordinate
