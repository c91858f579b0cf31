"""Whether workers' devices can hold a placement: bytes of stages and shadows against the room there is.

A worker that owns a stage holds its state (parameters, gradients, optimizer state) and what its forwards keep for their
backwards; the holder of a shadow the state alone. What forwards keep depends on how many micro-batches are on their
way between a block's forwards and its backwards: at most one more than there are blocks after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement, WorkerId

_USABLE = 0.94  # of a device: the rest is in pieces that are too small


@dataclass(frozen=True)
class Memory:
    """Bytes by stage: ``state`` of a stage and of its shadow, ``activations`` of one micro-batch; and the ``room`` on
    workers' devices, in bytes. A worker that is not in ``room`` has enough."""

    state: tuple[int, ...]
    activations: tuple[int, ...]
    room: Mapping[WorkerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.state or len(self.state) != len(self.activations):
            raise ValueError(
                f"state of {len(self.state)} stages, activations of {len(self.activations)}; give one of each per stage"
            )

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {"state": list(self.state), "activations": list(self.activations), "room": dict(self.room)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Memory:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            tuple(int(number) for number in value["state"]),
            tuple(int(number) for number in value["activations"]),
            {str(worker): int(number) for worker, number in value.get("room", {}).items()},
        )

    def owned(self, grid: Grid, owners: Sequence[Any], *, micro_batches: int) -> dict[Any, int]:
        """What the ``owners`` of all coordinates of ``grid``, in its order, hold of them."""
        held: dict[Any, int] = {}
        for begin in range(0, len(grid), grid.stages):
            its = owners[begin : begin + grid.stages]
            blocks = [list(block) for _, block in groupby(range(grid.stages), key=its.__getitem__)]
            for number, block in enumerate(blocks):
                under_way = min(micro_batches, len(blocks) - number)
                for stage in block:
                    took = self.state[stage] + under_way * self.activations[stage]
                    held[its[stage]] = held.get(its[stage], 0) + took
        return held

    def held(self, placement: Placement, *, micro_batches: int) -> dict[WorkerId, int]:
        """What every worker of ``placement`` holds, shadows included."""
        owners = [placement.owner(coordinate) for coordinate in placement.grid]
        held = self.owned(placement.grid, owners, micro_batches=micro_batches)
        for coordinate, worker in placement.all_shadows:
            held[worker] = held.get(worker, 0) + self.state[coordinate.stage]
        return held

    def excess(self, held: Mapping[WorkerId, int]) -> int:
        """Bytes for which there is no room, of all workers together."""
        return sum(max(0, taken - self.room[worker]) for worker, taken in held.items() if worker in self.room)

    def fits(self, placement: Placement, *, micro_batches: int) -> bool:
        """Whether every worker can hold what ``placement`` gives it."""
        return not self.excess(self.held(placement, micro_batches=micro_batches))


@dataclass(frozen=True)
class MeasuredMemory:
    """What workers have measured: by stage the bytes of its state and of a micro-batch's activations, and the rooms."""

    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    room: Mapping[WorkerId, int] = field(default_factory=dict)

    def after(
        self, seen: Mapping[WorkerId, Mapping[str, Any]], placement: Placement, *, micro_batches: int
    ) -> MeasuredMemory:
        """With what the workers in ``seen`` say of iterations with ``placement``.

        They say ``stages``, triples of a stage and its two sizes; ``usable``, what tensors can take on the device; and
        ``peak``, what they took at most. What the peak has beyond stages and shadows, kernels need besides: as much
        stays free. Of a stage that several workers own, in several pipelines, the most counts.
        """
        newest: dict[int, tuple[int, int]] = {}
        for value in seen.values():
            for stage, state, activations in value["stages"]:
                known = newest.get(stage, (0, 0))
                newest[stage] = (max(known[0], state), max(known[1], activations))
        stages, rooms = {**self.stages, **newest}, dict(self.room)
        sizes = _memory(stages, placement.grid.stages, {})
        held = {} if sizes is None else sizes.held(placement, micro_batches=micro_batches)
        for worker, value in sorted(seen.items()):
            if sizes is not None:
                besides = max(0, int(value["peak"]) - held.get(worker, 0))
                rooms[worker] = int(_USABLE * value["usable"]) - besides
        return MeasuredMemory(stages, rooms)

    def of(self, stages: int, *, members: Collection[WorkerId]) -> Memory | None:
        """For placing ``stages`` on ``members``; None until every stage is known, and where no room is limited."""
        room = {worker: its for worker, its in self.room.items() if worker in members}
        return _memory(self.stages, stages, room) if room else None


def _memory(sizes: Mapping[int, tuple[int, int]], stages: int, room: Mapping[WorkerId, int]) -> Memory | None:
    if any(stage not in sizes for stage in range(stages)):
        return None
    state, activations = zip(*(sizes[stage] for stage in range(stages)), strict=True)
    return Memory(state, activations, room)
