"""The grid that a job trains with: pipelines x stages, and the coordinates in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Coordinate(NamedTuple):
    """One cell of the grid. Text form: ``pipeline.stage``, as in ``0.2``."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        """Read the text form back. Raises ValueError for anything else."""
        pipeline, separator, stage = text.partition(".")
        if not (separator and pipeline.isdigit() and stage.isdigit()):
            raise ValueError(f"{text!r} is no coordinate; write it as PIPELINE.STAGE, for example 0.2")
        return cls(int(pipeline), int(stage))


@lru_cache(maxsize=64)
def _coordinates(pipelines: int, stages: int) -> tuple[Coordinate, ...]:
    return tuple(Coordinate(d, p) for d in range(pipelines) for p in range(stages))


@dataclass(frozen=True)
class Grid:
    """``pipelines`` x ``stages`` coordinates. Constant for the whole life of a job (architecture 6)."""

    pipelines: int
    stages: int

    def __post_init__(self) -> None:
        if self.pipelines < 1 or self.stages < 1:
            raise ValueError(f"a grid needs at least 1 pipeline and 1 stage, got {self.pipelines} x {self.stages}")

    def __len__(self) -> int:
        return self.pipelines * self.stages

    def __iter__(self) -> Iterator[Coordinate]:
        """All coordinates, pipeline by pipeline, stages in order."""
        return iter(_coordinates(self.pipelines, self.stages))

    def __contains__(self, coordinate: object) -> bool:
        if not isinstance(coordinate, Coordinate):
            return False
        return 0 <= coordinate.pipeline < self.pipelines and 0 <= coordinate.stage < self.stages

    def predecessor(self, coordinate: Coordinate) -> Coordinate:
        """The coordinate whose worker normally holds the shadow of ``coordinate`` (architecture 2).

        The previous stage, cyclically; with one stage the same stage of the next pipeline.
        """
        if self.stages == 1:
            return Coordinate((coordinate.pipeline + 1) % self.pipelines, 0)
        return Coordinate(coordinate.pipeline, (coordinate.stage - 1) % self.stages)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank that DeepSpeed's pipe-data topology gives this coordinate (axes pipe, data)."""
        return coordinate.stage * self.pipelines + coordinate.pipeline

    def coordinate(self, rank: int) -> Coordinate:
        """The inverse of :meth:`rank`. Raises ValueError for a rank outside the grid."""
        if not 0 <= rank < len(self):
            raise ValueError(f"rank {rank} is outside the grid of {len(self)} coordinates")
        stage, pipeline = divmod(rank, self.pipelines)
        return Coordinate(pipeline, stage)
