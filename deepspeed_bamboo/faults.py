"""Scripted faults as data: what fails, at which instruction. Nothing here sends a signal.

A script is a list of objects, in ``bamboo.faults`` or in the JSON file named by ``BAMBOO_FAULTS``::

    [{"step": 3, "pipeline": 0, "stage": 2, "at": "backward", "micro_batch": 1, "signal": "KILL"}]

reads: in step 3 (counted from 0), just before the backward of micro-batch 1, the worker that hosts
stage 2 of pipeline 0 kills itself.

Once per job. A worker that takes a coordinate over repeats instructions of the running step; so does
everyone after a checkpoint was restored. A fault has an ``"attempt"``, default 0: it fires only while
the coordinate is in that step for the first time. ``"attempt": 1`` fires in the first repetition,
which is how the loss of the worker that took over is scripted, ``"attempt": 2`` in the second, and so
on. In later steps the count starts at 0 again, whoever hosts the coordinate then, so a second loss in
a later step needs nothing special.

A further loss in the middle of a recovery is scripted by one of RECOVERY_POINTS in place of an instruction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import FAULTS
from deepspeed_bamboo.suggest import choose_from
from deepspeed_bamboo.text_files import UnreadableError, json_of, text_of

PER_MICRO_BATCH = ("forward", "backward", "send_activation", "send_grad")
PER_STEP = ("reduce", "step", "idle")
INSTRUCTIONS = PER_MICRO_BATCH + PER_STEP
# Moments of a recovery, in their order: the new epoch is known; this worker has reported; it is about to connect; it
# has what it takes over, about to go on; shadows are being rebuilt beside what is left of the step; and after that
# step, counted as the next one: they are rebuilt, about to be logged. A worker that has yet to end the step before the
# interrupted one is hit there.
RECOVERY_POINTS = ("interrupted", "reported", "regroup", "resume", "protect", "protected")
# Everything is reduced and mirrored, and about to be agreed upon; the parts of an optimizer that is split over the
# pipelines are gathered in the step, about to be agreed upon; and between two steps: a stage is about to be written to
# a checkpoint, or read from one.
FURTHER_POINTS = ("commit", "gather", "save", "load")
SIGNALS = ("KILL", "STOP", "TERM", "NOTICE")

_DEFAULTS: Mapping[str, Any] = {"pipeline": 0, "signal": "KILL", "attempt": 0}
_REQUIRED: Mapping[str, str] = {
    "step": "name the step in which it strikes, from 0 up",
    "stage": "name the stage whose worker it hits, from 0 up",
    "at": f"name the instruction before which it strikes: {', '.join(INSTRUCTIONS)}, "
    f"or a point of a recovery ({', '.join(RECOVERY_POINTS)})",
}
_COUNTS = ("step", "pipeline", "stage", "attempt", "micro_batch")


@dataclass(frozen=True)
class Fault:
    """One scripted fault. ``signal`` is one of SIGNALS, ``at`` of INSTRUCTIONS, RECOVERY_POINTS or FURTHER_POINTS.

    ``idle`` is the moment before a step's first instruction. ``micro_batch`` is None exactly for the
    instructions that a step has once; ``seconds`` (how long before the node goes) exactly for NOTICE.
    """

    step: int
    stage: int
    at: str
    micro_batch: int | None = None
    signal: str = "KILL"
    pipeline: int = 0
    seconds: float | None = None
    attempt: int = 0

    @property
    def coordinate(self) -> Coordinate:
        """The cell of the grid whose worker it hits."""
        return Coordinate(self.pipeline, self.stage)

    @property
    def name(self) -> str:
        """Letters, digits and ``.-`` that stand for this fault and no other of its script."""
        instruction = self.at if self.micro_batch is None else f"{self.at}-{self.micro_batch}"
        return f"{self.signal}-{self.coordinate}-{instruction}-step-{self.step}-attempt-{self.attempt}"

    def __str__(self) -> str:
        instruction = self.at if self.micro_batch is None else f"{self.at}({self.micro_batch})"
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"{self.signal} {self.coordinate} at {instruction} of step {self.step}{again}"

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`FaultScript.parse` reads back equal."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class FaultScript:
    """All scripted faults of a job. Immutable; an empty one is what a normal job has."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, value: object, *, where: str = "bamboo.faults") -> FaultScript:
        """Read the list form. ``where`` names its source in messages.

        Raises ConfigError that lists every problem: unknown or missing keys, wrong types, an instruction
        or signal that doesn't exist, a micro-batch where there is none, the same fault twice.
        """
        if not isinstance(value, list | tuple):
            raise ConfigError(f"got {value!r}, but a fault script is a list of objects; put it in [ ]", where=where)
        problems: list[str] = []
        faults: list[Fault] = []
        for number, item in enumerate(value):
            found, fault = _parse_fault(item)
            problems.extend(f"fault {number}: {text}" for text in found)
            if fault is not None and fault in faults:
                problems.append(f"fault {number}: {fault} is listed twice; a fault fires once, remove one")
            elif fault is not None:
                faults.append(fault)
        if problems:
            raise ConfigError(*problems, where=where)
        return cls(tuple(faults))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FaultScript:
        """Read a JSON file with the list form. Raises ConfigError that names the file."""
        where = f"fault script {os.fspath(path)}"
        try:
            value = json_of(text_of(Path(path)))
        except UnreadableError as error:
            raise ConfigError(f"{error}; name a JSON file with a list of objects", where=where) from error
        return cls.parse(value, where=where)

    @classmethod
    def of_job(cls, setting: object = None, *, environment: Mapping[str, str] | None = None) -> FaultScript:
        """The script that a job uses: the file named by BAMBOO_FAULTS, else ``bamboo.faults``, else none.

        ``setting`` is the value of ``bamboo.faults``: a list, the path of a file, or None.
        ``environment`` defaults to the process's own. Raises ConfigError.
        """
        path = (os.environ if environment is None else environment).get(FAULTS)
        if path:
            return cls.load(path)
        if setting is None:
            return cls()
        if isinstance(setting, str | os.PathLike):
            return cls.load(setting)
        return cls.parse(setting)

    def check(self, grid: Grid, *, micro_batches: int) -> None:
        """Raise ConfigError for faults that could never fire in this grid, with ``micro_batches`` a step."""
        problems = [
            f"{fault}: {problem}"
            for fault in self.faults
            for problem in _misfits(fault, grid=grid, micro_batches=micro_batches)
        ]
        if problems:
            raise ConfigError(*problems, where="fault script")

    def match(
        self, *, step: int, pipeline: int, stage: int, at: str, micro_batch: int | None = None, attempt: int = 0
    ) -> Fault | None:
        """The fault to cause just before this instruction, or None.

        ``attempt``: how often coordinate (pipeline, stage) has been in this step before. 0 in
        undisturbed running; in the step in which it changed hands, the number of times it did.
        """
        for fault in self.faults:
            here = (fault.step, fault.pipeline, fault.stage, fault.at, fault.micro_batch, fault.attempt)
            if here == (step, pipeline, stage, at, micro_batch, attempt):
                return fault
        return None

    def to_json(self) -> list[dict[str, Any]]:
        """The list form; :meth:`parse` reads it back equal."""
        return [fault.to_json() for fault in self.faults]


def _parse_fault(item: object) -> tuple[list[str], Fault | None]:
    """Problems of one object, and the fault when there are none."""
    if not isinstance(item, Mapping):
        return [f'got {item!r}; write an object such as {{"step": 3, "stage": 2, "at": "forward"}}'], None
    names = [field.name for field in fields(Fault)]
    problems = [f"unknown key {choose_from(key, names)}" for key in item if key not in names]
    problems += [f"{key!r} is missing; {remedy}" for key, remedy in _REQUIRED.items() if key not in item]
    values = {**_DEFAULTS, **{key: item[key] for key in names if key in item}}
    if values.get("at") in PER_MICRO_BATCH:
        values.setdefault("micro_batch", 0)
    problems += _wrong_values(values)
    return (problems, None) if problems else ([], Fault(**values))


def _wrong_values(values: Mapping[str, Any]) -> Iterable[str]:
    for key in _COUNTS:
        value = values.get(key)
        if key in values and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            yield f"{key} {value!r} must be a whole number from 0 up"
    known = INSTRUCTIONS + RECOVERY_POINTS + FURTHER_POINTS
    if "at" in values and values["at"] not in known:
        yield f"unknown instruction {choose_from(values['at'], known)}"
    if values["signal"] not in SIGNALS:
        yield f"unknown signal {choose_from(values['signal'], SIGNALS)}"
    if values.get("at") in PER_STEP + RECOVERY_POINTS + FURTHER_POINTS and "micro_batch" in values:
        yield f"{values['at']!r} happens once a step and has no micro_batch; leave micro_batch out"
    seconds = values.get("seconds")
    if values["signal"] == "NOTICE":
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            yield f'a NOTICE says in "seconds" when the node goes, from 0 up; got {seconds!r}'
    elif "seconds" in values:
        yield f'"seconds" belongs to NOTICE; signal {values["signal"]!r} acts at once, leave it out'


def _misfits(fault: Fault, *, grid: Grid, micro_batches: int) -> Iterable[str]:
    if fault.coordinate not in grid:
        yield (
            f"there is no coordinate {fault.coordinate}; this job has pipelines 0..{grid.pipelines - 1} "
            f"and stages 0..{grid.stages - 1}"
        )
    if fault.micro_batch is not None and fault.micro_batch >= micro_batches:
        yield f"there is no micro-batch {fault.micro_batch}; this job has 0..{micro_batches - 1}"
    if fault.at == "send_activation" and fault.stage == grid.stages - 1:
        yield f"stage {fault.stage} is the last and sends no activation; use an earlier stage or 'forward'"
    if fault.at == "send_grad" and fault.stage == 0:
        yield "stage 0 is the first and sends no gradient; use a later stage or 'backward'"
