"""How many micro-batches each step of a job had, for a script may change that from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class MicroBatchCounts:
    """Counts by step.

    Args:
        changes: pairs of a step and the number of micro-batches of a pipeline from that step on, by step. Nothing is
            known of steps before the first.
    """

    changes: tuple[tuple[int, int], ...] = ()

    def with_step(self, step: int, count: int) -> MicroBatchCounts:
        """With ``count`` micro-batches in ``step``. What is known of later ones is dropped: steps are done again."""
        before = tuple(change for change in self.changes if change[0] < step)
        return MicroBatchCounts(before if before and before[-1][1] == count else (*before, (step, count)))

    def total(self, since: int, *, until: int) -> int | None:
        """The micro-batches of steps ``since`` to ``until - 1`` together; None where not all are known."""
        if since >= until:
            return 0
        if not self.changes or self.changes[0][0] > since:
            return None
        bounds = [*self.changes, (until, 0)]
        return sum(count * max(0, min(until, end) - max(since, start)) for (start, count), (end, _) in pairwise(bounds))

    def to_json(self) -> list[list[int]]:
        """As values that can be sent and saved."""
        return [list(change) for change in self.changes]

    @staticmethod
    def from_json(value: Sequence[Any]) -> MicroBatchCounts:
        """Inverse of :meth:`to_json`."""
        return MicroBatchCounts(tuple((int(step), int(count)) for step, count in value))
