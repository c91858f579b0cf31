"""How far a coordinate is inside an iteration: five counts, which is all that a recovery plan needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspeed_bamboo.core.grid import Coordinate, Grid


class CoordinateProgress(NamedTuple):
    """Counts: micro-batches ``0 .. n-1`` are done, since everything happens in micro-batch order.

    ``CoordinateProgress()`` is the start of an iteration. The first stage receives no activations and
    the last no gradients; only these two load. Only what was seen complete counts (architecture 5).
    """

    loaded: int = 0
    activations_received: int = 0
    forwards: int = 0
    gradients_received: int = 0
    backwards: int = 0

    def to_json(self) -> dict[str, int]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return self._asdict()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CoordinateProgress:
        """Inverse of :meth:`to_json`. Raises ValueError for other keys and for values that are no counts."""
        names = set(cls._fields)
        if set(value) != names:
            raise ValueError(
                f"progress has the keys {', '.join(sorted(names))}, got {', '.join(sorted(value)) or 'none'}"
            )
        bad = {k: v for k, v in value.items() if not isinstance(v, int) or isinstance(v, bool) or v < 0}
        if bad:
            raise ValueError(f"progress counts micro-batches, from 0 up; got {bad}")
        return cls(**value)


def shadow_progress(coordinate: Coordinate, done: CoordinateProgress, *, last_stage: int) -> CoordinateProgress:
    """The counts of a shadow with these FRC (``forwards``) and BRC (``backwards``) and no input that waits.

    So they are what its coordinate starts from when its worker takes over.
    """
    first, last = coordinate.stage == 0, coordinate.stage == last_stage
    return CoordinateProgress(
        loaded=done.forwards if first or last else 0,
        activations_received=0 if first else done.forwards,
        forwards=done.forwards,
        gradients_received=0 if last else done.backwards,
        backwards=done.backwards,
    )


def check_progress(progress: Mapping[Coordinate, CoordinateProgress], *, grid: Grid, micro_batches: int) -> None:
    """Raise ValueError when some coordinate's counts can't be: past the end, or computed without inputs."""
    for coordinate, counts in progress.items():
        if coordinate not in grid:
            raise ValueError(f"progress of {coordinate}, which is outside the grid {grid.pipelines} x {grid.stages}")
        broken = _broken_rule(counts, coordinate, grid=grid, micro_batches=micro_batches)
        if broken:
            raise ValueError(f"progress of {coordinate} can't be: {broken}; got {counts}")


def _broken_rule(counts: CoordinateProgress, coordinate: Coordinate, *, grid: Grid, micro_batches: int) -> str | None:
    first, last = coordinate.stage == 0, coordinate.stage == grid.stages - 1
    if not any(counts):
        return None
    rules = (
        (max(counts) <= micro_batches and min(counts) >= 0, f"every count lies in 0..{micro_batches}"),
        (counts.backwards <= counts.forwards, "a backward follows its forward"),
        (first or counts.forwards <= counts.activations_received, "a forward needs its activation"),
        (last or counts.backwards <= counts.gradients_received, "a backward needs its gradient"),
        (not (first or last) or counts.forwards <= counts.loaded, "the first and last stage load before a forward"),
        (not first or counts.activations_received == 0, "the first stage receives no activations"),
        (not last or counts.gradients_received == 0, "the last stage receives no gradients"),
    )
    return next((rule for holds, rule in rules if not holds), None)
