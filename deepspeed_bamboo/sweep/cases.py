"""Which faults a sweep tries: the cases of each profile, as data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from deepspeed_bamboo.faults import INSTRUCTIONS, PER_MICRO_BATCH, Fault, FaultScript
from deepspeed_bamboo.sweep.kinds import covering_losses, few_losses
from deepspeed_bamboo.sweep.outside import OutsideKill
from deepspeed_bamboo.sweep.setups import FIRST_SETUPS, MODE_SETUPS, STEPS, Setup, covering_setups, few_setups

EARLY_STEP, LATE_STEP = 0, 5
SELECTED_POINTS = ("reported",)


@dataclass(frozen=True)
class Case:
    """One job of a sweep: a setup, and what fails in it: scripted faults, or one kill from outside."""

    setup: Setup
    faults: FaultScript = field(default_factory=FaultScript)
    outside: OutsideKill | None = None

    @property
    def name(self) -> str:
        """Unique within a profile, as in ``M4/KILL-0.2-backward1-step5``."""
        outside = [] if self.outside is None else [str(self.outside)]
        return "/".join([self.setup.name, *(_fault_name(fault) for fault in self.faults.faults), *outside])


def first_failover() -> Iterator[Case]:
    """Every stage and instruction, at the first, middle and last micro-batch, in an early and a later step."""
    for setup in FIRST_SETUPS:
        for step in (EARLY_STEP, LATE_STEP):
            for fault in every_point(setup, step=step):
                yield Case(setup, FaultScript((fault,)))
    yield from stopped()


def stopped() -> Iterator[Case]:
    """A worker that stops answering and stays there, once for each stage; the lease finds it."""
    setup = FIRST_SETUPS[0]
    for stage, at in enumerate(("forward", "backward", "reduce", "step")):
        micro_batch = 1 if at in PER_MICRO_BATCH else None
        yield Case(setup, FaultScript((Fault(LATE_STEP, stage, at, micro_batch, signal="STOP"),)))


def quick() -> Iterator[Case]:
    """A few of the first: each stage once, each kind of instruction once, one stopped worker."""
    setup = FIRST_SETUPS[0]
    points = ((0, "forward", 0), (1, "backward", 2), (2, "send_grad", 1), (3, "reduce", None), (1, "step", None))
    for stage, at, micro_batch in (*points, (0, "send_activation", 3), (2, "idle", None)):
        yield Case(setup, FaultScript((Fault(LATE_STEP, stage, at, micro_batch),)))
    yield next(iter(stopped()))


def at_random(count: int = 20, *, seed: int = 0) -> Iterator[Case]:
    """Kills from outside, each of some worker at some moment; the same ones for the same seed."""
    setup, numbers = FIRST_SETUPS[0], random.Random(seed)
    for _ in range(count):
        kill = OutsideKill(numbers.randrange(setup.workers), numbers.randrange(STEPS - 2), numbers.uniform(0.0, 0.15))
        yield Case(setup, outside=kill)


def full() -> Iterator[Case]:
    """A covering selection of everything, not the product.

    Every point of every stage for one setup (M4 in a later step, M8 in the first), kills from outside, losses in a
    row; the modes at points that differ in kind; and setups in which every two values of ``FACTORS`` meet (grids,
    micro-batches, modes, precisions, models, updates), in each at least two losses, so that every kind of loss meets
    every value that it can meet; and setups that start on fewer workers than coordinates. About an hour on two cores.
    """
    for setup, step in zip(FIRST_SETUPS, (LATE_STEP, EARLY_STEP), strict=True):
        for fault in every_point(setup, step=step):
            yield Case(setup, FaultScript((fault,)))
    yield from stopped()
    yield from losses_in_a_row(FIRST_SETUPS[0])
    for setup in MODE_SETUPS:
        for fault in points_of_each_kind(setup, step=LATE_STEP):
            yield Case(setup, FaultScript((fault,)))
    yield from covering()
    yield from few()
    yield from at_random()


def covering() -> Iterator[Case]:
    """The part of the full profile that combines everything with everything."""
    for setup, script in covering_losses(covering_setups(), least=2):
        yield Case(setup, script)


def few() -> Iterator[Case]:
    """The part of the full profile that starts on fewer workers than coordinates: blocks, and boundaries at which they
    change. Each is compared with the undisturbed run that has a worker for each coordinate."""
    for setup, script in few_losses(few_setups(), each=2):
        yield Case(setup, script)


def losses_in_a_row(setup: Setup) -> Iterator[Case]:
    """Two and three losses, one after the other; of the worker that took over; and during recovery."""
    stages = range(setup.stages)
    for stage in stages:
        other = (stage + 2) % setup.stages
        yield Case(setup, _script(Fault(2, stage, "backward", 1), Fault(5, other, "forward", 1)))
        yield Case(setup, _script(Fault(2, stage, "backward", 1), Fault(5, stage, "forward", 1)))
        yield Case(setup, _script(Fault(2, stage, "backward", 1), Fault(2, other, "reduce")))
    yield Case(setup, _script(*(Fault(step, stage, "backward", 1) for step, stage in ((1, 1), (3, 2), (5, 3)))))


def selection() -> Iterator[Case]:
    """Of the covering cases a few with a second loss in the middle of a recovery; under a minute."""
    cases = sorted(covering(), key=lambda case: case.setup.workers)
    for point in SELECTED_POINTS:
        yield next(case for case in cases if any(fault.at == point for fault in case.faults.faults))


PROFILES: Mapping[str, Callable[[], Iterable[Case]]] = {
    "quick": quick,
    "first": first_failover,
    "random": at_random,
    "covering": covering,
    "few": few,
    "selection": selection,
    "full": full,
}


def select(profile: str, *, only: Iterable[str] = ()) -> list[Case]:
    """The cases of a profile whose names match one of the patterns in ``only`` (all when there is none)."""
    patterns = tuple(only)
    cases = list(PROFILES[profile]())
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]


def every_point(setup: Setup, *, step: int) -> Iterator[Fault]:
    """A fault at every instruction of every coordinate; of micro-batches the first, a middle and the last."""
    for coordinate in setup.grid:
        for at in INSTRUCTIONS:
            for micro_batch in _micro_batches(at, count=setup.micro_batches):
                if _exists(at, stage=coordinate.stage, stages=setup.stages):
                    yield Fault(step, coordinate.stage, at, micro_batch, pipeline=coordinate.pipeline)


def points_of_each_kind(setup: Setup, *, step: int) -> Iterator[Fault]:
    """For every coordinate a backward in the middle of the step; the rest of the instructions in turn."""
    others = [at for at in INSTRUCTIONS if at != "backward"]
    for number, coordinate in enumerate(setup.grid):
        middle = setup.micro_batches // 2
        yield Fault(step, coordinate.stage, "backward", middle, pipeline=coordinate.pipeline)
        for at in (others[number % len(others)], others[(number + 3) % len(others)]):
            if _exists(at, stage=coordinate.stage, stages=setup.stages):
                micro_batch = middle if at in PER_MICRO_BATCH else None
                yield Fault(step, coordinate.stage, at, micro_batch, pipeline=coordinate.pipeline)


def _script(*faults: Fault) -> FaultScript:
    return FaultScript(faults)


def _micro_batches(at: str, *, count: int) -> list[int | None]:
    if at not in PER_MICRO_BATCH:
        return [None]
    return [*dict.fromkeys((0, count // 2, count - 1))]


def _exists(at: str, *, stage: int, stages: int) -> bool:
    return not (at == "send_activation" and stage == stages - 1) and not (at == "send_grad" and stage == 0)


def _fault_name(fault: Fault) -> str:
    micro_batch = "" if fault.micro_batch is None else str(fault.micro_batch)
    again = f"-attempt{fault.attempt}" if fault.attempt else ""
    return f"{fault.signal}-{fault.coordinate}-{fault.at}{micro_batch}-step{fault.step}{again}"
