"""What happens to a job's machines, drawn from a seed: workers are killed, one or many at once, join, are drained, get
notices; etcd dies.

Pure: a list of values, each at a step. ``random_run.py`` carries them out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.faults import PER_MICRO_BATCH, Fault, FaultScript

# A worker that is to join or to leave does so at the boundary after the step, or after the next one when a loss or
# an absent etcd comes between. Until then it may not be there yet, or its node is still the one to be asked to leave.
_STEPS_TO_SETTLE = 3
# A worker that is killed in its step is missed in the next iteration, at whose end lost shadows are back.
_STEPS_TO_PROTECT = 2
# Before many are lost at once a first checkpoint has to be complete that the others can go back to.
_STEPS_TO_REMEMBER = 12
_LEAST_BULK = 2
_POINTS = ("forward", "backward", "send_activation", "send_grad", "reduce", "step", "idle")


class Kind(Enum):
    """What happens."""

    KILL = "kill"  # SIGKILL of the worker, at an instruction of its stage
    JOIN = "join"  # one more worker comes
    DRAIN = "drain"  # somebody asks the job to leave the worker's node
    NOTICE = "notice"  # the worker's agent is warned by a signal
    ETCD = "etcd"  # SIGKILL of etcd, which is started again on its data
    BULK = "bulk"  # SIGKILL of a worker at an instruction of its stage, and of others as soon as that is seen


_WEIGHTS = {Kind.KILL: 30, Kind.JOIN: 40, Kind.DRAIN: 10, Kind.NOTICE: 10, Kind.ETCD: 10}
# Most of what is lost at once has to join again, so kills of one worker are fewer.
_BULK_WEIGHTS = {**_WEIGHTS, Kind.KILL: 10, Kind.JOIN: 60, Kind.BULK: 60}
_LEAVES = (Kind.DRAIN, Kind.NOTICE)
_KILLS = (Kind.KILL, Kind.BULK)
_REMOVES = (*_KILLS, *_LEAVES)


@dataclass(frozen=True)
class Happening:
    """``kind`` at ``step``, to the worker of ``coordinate`` (None: to no worker). ``fault``: how it is killed.

    ``workers``: how many go, that one included.
    """

    step: int
    kind: Kind
    coordinate: Coordinate | None = None
    fault: Fault | None = None
    workers: int = 1

    def __str__(self) -> str:
        if self.kind is Kind.BULK:
            return f"{self.fault}, and {self.workers - 1} more at once"
        if self.fault is not None:
            return str(self.fault)
        return f"{self.kind.value}{'' if self.coordinate is None else f' {self.coordinate}'} at step {self.step}"


def draw(
    seed: int, *, grid: Grid, steps: int, count: int, micro_batches: int, workers: int, most: int, bulk: bool = False
) -> tuple[Happening, ...]:
    """``count`` happenings in different steps of a run of ``steps``; the same arguments draw the same ones.

    The job starts with ``workers`` and never has more than ``most``, nor fewer than one: a worker goes only when
    another is sure to be there, and is killed only when lost shadows are back, so no loss is fatal. With ``bulk`` two
    to all but one are lost at once, too. Raises ValueError when there are not enough steps.
    """
    if count > steps - 4:
        raise ValueError(f"{count} events in different steps need at least {count + 4} steps; got {steps}")
    source = random.Random(seed)
    state, drawn = _Drawn(alive=workers, most=most, before=-steps), []
    weights = _BULK_WEIGHTS if bulk else _WEIGHTS
    for step in sorted(source.sample(range(1, steps - 3), count)):
        possible = [kind for kind in weights if state.allows(kind, step)]
        kind = source.choices(possible, [weights[kind] for kind in possible])[0]
        number = source.randint(_LEAST_BULK, state.alive - 1) if kind is Kind.BULK else 1
        state.take(kind, step, number)
        coordinate = source.choice(list(grid)) if kind in _REMOVES else None
        fault = None
        if kind in _KILLS and coordinate is not None:
            fault = _fault(source, step=step, coordinate=coordinate, grid=grid, micro_batches=micro_batches)
        drawn.append(Happening(step, kind, coordinate, fault, number))
    return tuple(drawn)


class _Drawn:
    """How many workers there are, and when they came and went, as happenings are drawn."""

    def __init__(self, *, alive: int, most: int, before: int) -> None:
        """``before``: a step long before the first."""
        self.alive = alive
        self._most = most
        self._joined_at = [before]
        self._left_at = self._killed_at = before

    def allows(self, kind: Kind, step: int) -> bool:
        """Whether ``kind`` may happen at ``step``."""
        arriving = sum(step - at <= _STEPS_TO_SETTLE for at in self._joined_at)
        if kind is Kind.BULK:
            leaving = step - self._left_at <= _STEPS_TO_SETTLE
            return self.alive > _LEAST_BULK and step >= _STEPS_TO_REMEMBER and not arriving and not leaving
        return (
            (kind not in _REMOVES or self.alive - arriving >= 2)
            and (kind is not Kind.JOIN or self.alive < self._most)
            and (kind is not Kind.KILL or step - self._killed_at > _STEPS_TO_PROTECT)
            and (kind not in _LEAVES or step - self._left_at > _STEPS_TO_SETTLE)
        )

    def take(self, kind: Kind, step: int, number: int) -> None:
        """It happens, to so many workers."""
        if kind is Kind.JOIN:
            self.alive += 1
            self._joined_at.append(step)
        if kind in _REMOVES:
            self.alive -= number
        if kind in _LEAVES:
            self._left_at = step
        if kind in _KILLS:
            self._killed_at = step


def faults_of(happenings: Sequence[Happening]) -> FaultScript:
    """The scripted faults among them."""
    return FaultScript(tuple(happening.fault for happening in happenings if happening.fault is not None))


def counts_of(happenings: Sequence[Happening]) -> Counter[Kind]:
    """How many there are of each kind."""
    return Counter(happening.kind for happening in happenings)


def _fault(source: random.Random, *, step: int, coordinate: Coordinate, grid: Grid, micro_batches: int) -> Fault:
    possible = [
        at
        for at in _POINTS
        if not (at == "send_activation" and coordinate.stage == grid.stages - 1)
        and not (at == "send_grad" and coordinate.stage == 0)
    ]
    at = source.choice(possible)
    number = source.randrange(micro_batches) if at in PER_MICRO_BATCH else None
    return Fault(step=step, pipeline=coordinate.pipeline, stage=coordinate.stage, at=at, micro_batch=number)
