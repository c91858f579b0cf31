"""What each worker has to do by a plan before its iteration may end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.schedule import Plan


class Counts(Protocol):
    """How many micro-batches a coordinate or shadow is through with; may grow."""

    @property
    def forwards(self) -> int:
        """Forwards done."""

    @property
    def backwards(self) -> int:
        """Backwards done."""


class Debts:
    """What each worker owes by a plan, against what is done so far (``own``, and ``red`` for shadows)."""

    def __init__(
        self,
        plan: Plan,
        *,
        own: Mapping[Coordinate, Counts],
        red: Mapping[Coordinate, Counts],
    ) -> None:
        self._micro_batches = plan.micro_batches
        self._owed: dict[WorkerId, list[tuple[Op, Coordinate, Counts]]] = {}
        stages = plan.placement.grid.stages
        normal = (Op.FNC, Op.BNC) if plan.mode.trains else (Op.FNC,)
        optional = plan.mode.redundant_passes_are_optional
        redundant = [() if optional else plan.mode.redundant_ops_of(stage, stages=stages) for stage in range(stages)]
        kinds = ((plan.placement.owners, own, [normal] * stages), (plan.placement.shadows, red, redundant))
        for holders, states, ops in kinds:
            for c, worker in holders if any(ops) else ():
                if c in states:
                    self._owed.setdefault(worker, []).extend((op, c, states[c]) for op in ops[c.stage])

    def of(self, worker: WorkerId) -> str | None:
        """What ``worker`` has not done, in words; None when all is done."""
        for op, c, state in self._owed.get(worker, ()):
            done = state.forwards if op in (Op.FNC, Op.FRC) else state.backwards
            if done < self._micro_batches:
                return f"{op.value} {c} {done} is missing"
        return None
