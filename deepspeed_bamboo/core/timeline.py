"""When instructions run: costs in whole time slots, and instructions with their start and end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import WorkerId


@dataclass(frozen=True)
class Costs:
    """Slots that one micro-batch takes on one stage. Everything that is not compute takes none.

    A backward does about twice the work of a forward. Raises ValueError for costs under 1.
    """

    forward: int = 1
    backward: int = 2

    def __post_init__(self) -> None:
        if self.forward < 1 or self.backward < 1:
            raise ValueError(f"a pass takes at least 1 slot, got {self.forward} forward and {self.backward} backward")

    def by_op(self) -> dict[Op, int]:
        """Slots per op; an op that is missing takes none."""
        return {Op.FNC: self.forward, Op.FRC: self.forward, Op.BNC: self.backward, Op.BRC: self.backward}


class Timed(NamedTuple):
    """``instruction`` on ``worker``, from slot ``start`` up to and without slot ``end``."""

    worker: WorkerId
    instruction: Instruction
    start: int
    end: int


# The compute instructions of each worker in the order in which it runs them: start times never decrease.
Order = Mapping[WorkerId, tuple[Timed, ...]]


def length(timeline: Iterable[Timed]) -> int:
    """The slot at which the last instruction ends; 0 for none."""
    return max((timed.end for timed in timeline), default=0)
