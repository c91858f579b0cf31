"""Who sends whom the data of a pipeline's ends, where not every worker has an iterator. Pure.

DeepSpeed wants data on first and last stages only. A worker that takes such a stage over and has no data of its own
gets the inputs, or the labels, of each micro-batch from one that has: as long as one is left.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId

Table = Mapping[WorkerId, Container[int]]
"""The pipelines that each worker has the data of."""


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


def unsafe_ends(placement: Placement, table: Table, *, members: Sequence[WorkerId]) -> Iterator[Coordinate]:
    """The ends whose owner is the only one with their data, though another worker is to stand in for it."""
    for coordinate, holder in placement.shadows:
        if is_end(coordinate, placement):
            others = [
                w for w in feeders(coordinate.pipeline, table, members=members) if w != placement.owner(coordinate)
            ]
            if not others and holder in members:
                yield coordinate
