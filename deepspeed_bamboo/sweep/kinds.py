"""Kinds of loss, each as a function that scripts one for a setup, at a drawn place; or none that can be survived."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.faults import INSTRUCTIONS, PER_MICRO_BATCH, Fault, FaultScript
from deepspeed_bamboo.sweep.setups import Setup

_EARLY, _LATE = 2, 5  # steps
_LOSSES_IN_A_ROW = 3

_Draw = random.Random
Kind = Callable[[Setup, _Draw], FaultScript | None]


def covering_losses(setups: Sequence[Setup], *, least: int, seed: int = 0) -> Iterator[tuple[Setup, FaultScript]]:
    """At least ``least`` scripts for each setup, so that every kind of loss meets every value that it can meet.

    A setup's values are the parts of its name. The same ones for the same ``seed``.
    """
    numbers = random.Random(seed)
    scripts = {setup: {name: script for name in KINDS if (script := KINDS[name](setup, numbers))} for setup in setups}
    values = {setup: [*enumerate(setup.name.split("-"))] for setup in setups}
    open_pairs = {(kind, value) for setup in setups for kind in scripts[setup] for value in values[setup]}

    def gain(setup: Setup, kind: str) -> int:
        return sum((kind, value) in open_pairs for value in values[setup])

    for setup in setups:
        for number in range(len(scripts[setup])):
            kind = max(scripts[setup], key=lambda kind: gain(setup, kind) + numbers.random())
            if number >= least and not gain(setup, kind):
                break
            open_pairs.difference_update((kind, value) for value in values[setup])
            yield setup, scripts[setup].pop(kind)


def few_losses(setups: Sequence[Setup], *, each: int, seed: int = 0) -> Iterator[tuple[Setup, FaultScript]]:
    """``each`` scripts for every setup that starts on fewer workers than coordinates, kinds in turn.

    Between two losses there is a boundary at which stages may move, by measured times, so only losses in different
    steps are scripted: those are survived wherever stages are.
    """
    numbers = random.Random(seed)
    for number, setup in enumerate(setups):
        kinds = [_FEW_KINDS[(number * each + turn) % len(_FEW_KINDS)] for turn in range(len(_FEW_KINDS))]
        scripts = [script for kind in kinds if (script := KINDS[kind](setup, numbers)) is not None]
        for script in scripts[:each]:
            yield setup, script


def _in_a_pass(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """One loss in a pass or send, in the first step or a later one."""
    return _script(setup, [_fault(setup, numbers, PER_MICRO_BATCH, step=numbers.choice((0, _LATE)))])


def _in_the_tail(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """One loss at the end of an iteration or between two."""
    return _script(setup, [_fault(setup, numbers, ("reduce", "step", "idle"), step=numbers.choice((0, _LATE)))])


def _stopped(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """A worker that answers no more and stays there."""
    fault = _fault(setup, numbers, INSTRUCTIONS, step=_LATE, signal="STOP")
    return _script(setup, [fault])


def _in_a_row(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """As many losses of different coordinates as can be survived, up to three, in different steps."""
    coordinates = numbers.sample(list(setup.grid), min(_LOSSES_IN_A_ROW, len(setup.grid)))
    faults = [_fault(setup, numbers, INSTRUCTIONS, step=1 + 2 * n, at=c) for n, c in enumerate(coordinates)]
    scripts = (_script(setup, faults[:count]) for count in range(len(faults), 1, -1))
    return next((script for script in scripts if script), None)


def _again(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """The worker that took over is lost too, in a later step."""
    first = _fault(setup, numbers, INSTRUCTIONS, step=_EARLY)
    return _script(setup, [first, _fault(setup, numbers, INSTRUCTIONS, step=_LATE, at=first.coordinate)])


def _taker(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """The worker that took over is lost in the same step, doing the lost work again."""
    last = setup.micro_batches - 1
    where = numbers.choice(list(setup.grid))
    first = Fault(_LATE, where.stage, "backward", last, pipeline=where.pipeline)
    return _script(setup, [first, Fault(_LATE, where.stage, "backward", last, pipeline=where.pipeline, attempt=1)])


def _together(setup: Setup, numbers: _Draw) -> FaultScript | None:
    """Two at once in one pipeline, neighbours if that can be survived; in pipelines of one stage, two of those."""
    pairs = [
        (one, other)
        for one in setup.grid
        for other in setup.grid
        if one < other and (one.pipeline == other.pipeline or setup.stages == 1)
    ]
    numbers.shuffle(pairs)
    pairs.sort(key=lambda pair: pair[1].stage - pair[0].stage)
    fault = _fault(setup, numbers, ("idle", "forward", "backward", "reduce", "step"), step=_LATE)
    for pair in pairs:
        script = _script(
            setup, [Fault(_LATE, c.stage, fault.at, fault.micro_batch, pipeline=c.pipeline) for c in pair], at_once=True
        )
        if script:
            return script
    return None


def _at(*points: str) -> Kind:
    """A loss in the middle of an iteration, and a second at one of ``points`` of the recovery."""

    def kind(setup: Setup, numbers: _Draw) -> FaultScript | None:
        first = _fault(setup, numbers, ("forward", "backward"), step=_LATE)
        if "protect" in points and setup.mode == "off":
            return None
        others = [c for c in setup.grid if c != first.coordinate]
        numbers.shuffle(others)
        drawn = [(c, numbers.choice(points)) for c in others]
        faults = [Fault(_LATE + (at == "protected"), c.stage, at, pipeline=c.pipeline) for c, at in drawn]
        scripts = (_script(setup, [first, fault], at_once=True) for fault in faults)
        return next((script for script in scripts if script), None)

    return kind


KINDS: Mapping[str, Kind] = {
    "in-a-pass": _in_a_pass,
    "in-the-tail": _in_the_tail,
    "stopped": _stopped,
    "in-a-row": _in_a_row,
    "again": _again,
    "taker": _taker,
    "together": _together,
    "while-agreeing": _at("interrupted", "reported"),
    "while-regrouping": _at("regroup", "resume"),
    "while-protecting": _at("protect", "protected"),
}


_FEW_KINDS = ("in-a-pass", "in-a-row", "in-the-tail", "again", "stopped")


def _fault(
    setup: Setup,
    numbers: _Draw,
    instructions: Sequence[str],
    *,
    step: int,
    at: Coordinate | None = None,
    signal: str = "KILL",
) -> Fault:
    """A fault somewhere: of ``instructions`` one that there is at a drawn coordinate, or at ``at``."""
    c = at or numbers.choice(list(setup.grid))
    missing = {"send_activation": c.stage == setup.stages - 1, "send_grad": c.stage == 0}
    instruction = numbers.choice([name for name in instructions if not missing.get(name)])
    micro_batch = numbers.randrange(setup.micro_batches) if instruction in PER_MICRO_BATCH else None
    return Fault(step, c.stage, instruction, micro_batch, pipeline=c.pipeline, signal=signal)


def _script(setup: Setup, faults: Sequence[Fault], *, at_once: bool = False) -> FaultScript | None:
    """The script, if all its losses can be survived and leave somebody. ``at_once``: no shadow is rebuilt between."""
    if setup.few is not None:
        steps = {fault.step for fault in faults}
        return FaultScript(tuple(faults)) if len(steps) == len(faults) < setup.workers else None
    workers = [f"w{number}" for number in range(setup.workers)]
    protected = setup.mode != "off"
    placement = Placement.initial(setup.grid, workers, protected=protected, alike=setup.pipelines_alike)
    start, gone = placement, list[WorkerId]()
    step = faults[0].step
    for fault in faults:
        if not at_once and fault.step > step and protected:
            placement = placement.protected([worker for worker in workers if worker not in gone])
            start = placement
        step = fault.step
        gone.append(placement.owner(fault.coordinate))
        after, _ = placement.without(gone)
        together, _ = start.without([worker for worker in gone if worker in start.holders])
        if after is None or together is None:
            return None
        placement = after
    return FaultScript(tuple(faults))
