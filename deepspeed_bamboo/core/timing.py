"""How long an iteration takes with a placement: the plan's own order, run with measured durations and speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.ordering import order_passes
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.core.timeline import Costs

# Of a forward, where nothing is measured: a forward of a stage is worth at least so many times its messages.
_HANDOVER = 0.1
_HALVINGS = 8  # of the range in which a handover is looked for


@dataclass(frozen=True)
class Profile:
    """Seconds that a micro-batch takes in each stage on a worker of speed 1, and the speed of those that differ.

    ``handover`` is what passes before a tensor is on another worker: without it scattering stages would cost nothing.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    speeds: Mapping[WorkerId, float] = field(default_factory=dict)
    handover: float = 0.0

    def __post_init__(self) -> None:
        if not self.forward or len(self.forward) != len(self.backward):
            raise ValueError(
                f"{len(self.forward)} forwards and {len(self.backward)} backwards; a profile has one of each per stage"
            )
        wrong = [seconds for seconds in (*self.forward, *self.backward, *self.speeds.values()) if not seconds > 0.0]
        if wrong:
            raise ValueError(f"{wrong[0]} in a profile; durations and speeds are above 0")

    @classmethod
    def even(cls, stages: int) -> Profile:
        """All stages alike, a backward twice a forward: what is assumed before anything is measured."""
        return cls((1.0,) * stages, (2.0,) * stages, handover=_HANDOVER)

    def work(self, stage: int) -> float:
        """Seconds of both passes of a stage."""
        return self.forward[stage] + self.backward[stage]

    def speed(self, worker: WorkerId) -> float:
        """How fast a worker is."""
        return self.speeds.get(worker, 1.0)

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {
            "forward": list(self.forward),
            "backward": list(self.backward),
            "speeds": dict(self.speeds),
            "handover": self.handover,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            tuple(float(seconds) for seconds in value["forward"]),
            tuple(float(seconds) for seconds in value["backward"]),
            {str(worker): float(speed) for worker, speed in value.get("speeds", {}).items()},
            float(value.get("handover", 0.0)),
        )


def slowest_seconds(placement: Placement, profile: Profile) -> float:
    """Seconds a micro-batch on the worker that takes longest; an iteration takes that times its micro-batches, or more.

    Pipelines share the micro-batches of a step no further: each has all of its own.
    """
    busy: dict[WorkerId, float] = {}
    for coordinate, worker in placement.owners:
        busy[worker] = busy.get(worker, 0.0) + profile.work(coordinate.stage) / profile.speed(worker)
    return max(busy.values())


def iteration_seconds(placement: Placement, profile: Profile, *, micro_batches: int) -> float:
    """Seconds of all passes of an iteration, from the first to the last, bubbles included.

    Raises ValueError for a profile of another number of stages.
    """
    return max(end for _, end in timed_passes(placement, profile, micro_batches=micro_batches))


def timed_passes(
    placement: Placement,
    profile: Profile,
    *,
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress] | None = None,
) -> list[tuple[Instruction, float]]:
    """What is left of an iteration, with the seconds at which each pass ends; empty when nothing is.

    ``progress`` says what every coordinate has done already; by default nothing. Raises ValueError for a profile of
    another number of stages.
    """
    if len(profile.forward) != placement.grid.stages:
        raise ValueError(f"the profile has {len(profile.forward)} stages, the grid {placement.grid.stages}")
    coordinates = tuple(placement.grid)
    order = order_passes(
        placement,
        coordinates=coordinates,
        micro_batches=micro_batches,
        progress=progress or dict.fromkeys(coordinates, CoordinateProgress()),
        mode=Mode.LAZY,
        costs=Costs(),
    )
    passes = sorted((timed for its in order.values() for timed in its), key=attrgetter("start"))
    place = {coordinate: i for i, coordinate in enumerate(coordinates)}
    owners = [worker for _, worker in placement.owners]
    last, handover = placement.grid.stages - 1, profile.handover
    speeds = {worker: profile.speed(worker) for worker in order}
    free = dict.fromkeys(order, 0.0)
    # When passes end, by "is forward", place and micro-batch. What is not among the passes was done before.
    done: tuple[list[dict[int, float]], list[dict[int, float]]] = ([{} for _ in coordinates], [{} for _ in coordinates])
    ends: list[tuple[Instruction, float]] = []
    for worker, instruction, _, _ in passes:
        op, c, m, _ = instruction
        assert c is not None and m is not None
        forward, i = op is Op.FNC, place[c]
        begin = free[worker]
        if c.stage != (0 if forward else last):
            source = i - 1 if forward else i + 1
            before = done[forward][source].get(m)
            if before is not None:
                begin = max(begin, before + (handover if owners[source] != worker else 0.0))
        end = begin + (profile.forward if forward else profile.backward)[c.stage] / speeds[worker]
        free[worker] = done[forward][i][m] = end
        ends.append((instruction, end))
    return ends


def least_seconds(profile: Profile, *, pipelines: int, workers: Sequence[WorkerId], micro_batches: int) -> float:
    """A lower bound of an iteration on ``workers``, whatever the placement of whole stages.

    The work shared evenly by speed, or the largest stage on the fastest worker.
    """
    speeds = [profile.speed(worker) for worker in workers]
    work = [profile.work(stage) for stage in range(len(profile.forward))]
    return micro_batches * max(pipelines * sum(work) / sum(speeds), max(work) / max(speeds))


def with_handover(profile: Profile, placement: Placement, *, micro_batches: int, seconds: float) -> Profile:
    """``profile`` with the handover that explains why an iteration of ``placement`` has taken ``seconds``.

    It is at least the profile's own, and at most what a mean stage takes: what else an iteration does is in it too, so
    scattering stages is not underestimated.
    """
    low = profile.handover
    high = max(low, sum(map(profile.work, range(len(profile.forward)))) / len(profile.forward))

    def taken(handover: float) -> float:
        return iteration_seconds(placement, replace(profile, handover=handover), micro_batches=micro_batches)

    if taken(low) >= seconds:
        return profile
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if taken(middle) >= seconds else (middle, high)
    return replace(profile, handover=high)
