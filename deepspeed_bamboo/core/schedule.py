"""The orders of compute (1F1B, inference) and ``Plan``: one instruction list per worker, with a text form."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId


class Mode(enum.Enum):
    """What a plan contains: the values of ``redundancy.mode``, for eager three of them, and forward-only evaluation.
    ``eager`` itself runs every redundant forward, which ``redundancy.overlap`` asks for; the other two
    run those that fit into bubbles, EAGER_RECOMPUTE with the offload ``recompute``.
    """

    OFF = "off"
    LAZY = "lazy"
    EAGER = "eager"
    EAGER_BUBBLES = "eager-bubbles"
    EAGER_RECOMPUTE = "eager-recompute"
    FULL = "full"
    INFERENCE = "inference"

    @classmethod
    def planned(cls, name: str, *, offload: str = "cpu", overlap: bool = False) -> Mode:
        """What the settings ``redundancy.mode``, ``offload`` and ``overlap`` plan. Raises ValueError for no mode."""
        mode = cls(name)
        if mode is not cls.EAGER or overlap:
            return mode
        return cls.EAGER_RECOMPUTE if offload == "recompute" else cls.EAGER_BUBBLES

    @property
    def redundant_ops(self) -> tuple[Op, ...]:
        """Which redundant passes a plan of this mode runs at all."""
        if self in (Mode.EAGER, Mode.EAGER_BUBBLES, Mode.EAGER_RECOMPUTE):
            return (Op.FRC,)
        return (Op.FRC, Op.BRC) if self is Mode.FULL else ()

    def redundant_ops_of(self, stage: int, *, stages: int) -> tuple[Op, ...]:
        """Which redundant passes a plan of this mode runs for the shadow of ``stage``.

        Where forwards keep nothing for their backward, only their output is worth them, and nobody gets the last
        stage's: it is done in full once it is needed, as in mode lazy.
        """
        if self is Mode.EAGER_RECOMPUTE and stage == stages - 1:
            return ()
        return self.redundant_ops

    @property
    def redundant_passes_are_optional(self) -> bool:
        """Whether a plan leaves out redundant passes that fit into no bubble, and a worker may leave out more of them.

        Where the worker has no bubble left they would hold up the pipeline in each iteration; what is left out is
        done after a loss, as in mode lazy. Nothing in such a plan depends on them.
        """
        return self in (Mode.EAGER_BUBBLES, Mode.EAGER_RECOMPUTE)

    @property
    def trains(self) -> bool:
        """Whether plans of this mode run backwards and end with the tail."""
        return self is not Mode.INFERENCE


def forward_slot(*, stage: int, micro_batch: int) -> int:
    """The slot of FNC in the 1F1B grid, where a forward and a backward take one slot each."""
    return 2 * micro_batch + stage


def backward_slot(*, stages: int, stage: int, micro_batch: int) -> int:
    """The slot of BNC in the 1F1B grid: the way down to the last stage, and back."""
    return 2 * micro_batch + 2 * stages - 1 - stage


def stage_order(*, stages: int, micro_batches: int, stage: int) -> tuple[tuple[Op, int], ...]:
    """FNC and BNC of one stage in 1F1B order (PipeDream-flush), the order of DeepSpeed's ``TrainSchedule``.

    Raises ValueError for a stage outside ``0 .. stages-1`` or no micro-batches.
    """
    _check_stage(stages=stages, micro_batches=micro_batches, stage=stage)
    forwards = [(forward_slot(stage=stage, micro_batch=m), Op.FNC, m) for m in range(micro_batches)]
    backwards = [(backward_slot(stages=stages, stage=stage, micro_batch=m), Op.BNC, m) for m in range(micro_batches)]
    # Forward and backward slots of one stage differ in parity, so no two are equal.
    return tuple((op, m) for _, op, m in sorted(forwards + backwards, key=lambda item: item[0]))


def inference_order(*, stages: int, micro_batches: int, stage: int) -> tuple[tuple[Op, int], ...]:
    """FNC of one stage when only forwards run: DeepSpeed's ``InferenceSchedule``. Raises as stage_order."""
    _check_stage(stages=stages, micro_batches=micro_batches, stage=stage)
    return tuple((Op.FNC, m) for m in range(micro_batches))


def _check_stage(*, stages: int, micro_batches: int, stage: int) -> None:
    if micro_batches < 1:
        raise ValueError(f"an iteration needs at least 1 micro-batch, got {micro_batches}")
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is outside the pipeline; its stages are 0..{stages - 1}")


@dataclass(frozen=True)
class Plan:
    """What every worker executes: a whole iteration, or the rest of an interrupted one.

    ``programs`` holds, for each worker that owns or shadows something in ``pipelines``, its
    instructions in order. ``pipelines`` is all of them unless only some were asked for.
    """

    placement: Placement
    micro_batches: int
    programs: tuple[tuple[WorkerId, tuple[Instruction, ...]], ...]
    mode: Mode = Mode.LAZY
    pipelines: tuple[int, ...] = (0,)

    def program(self, worker: WorkerId) -> tuple[Instruction, ...]:
        """The instructions of ``worker``. Raises KeyError, naming those it has, for a worker without a program."""
        for name, program in self.programs:
            if name == worker:
                return program
        raise KeyError(f"no program for worker {worker!r}; the plan has {', '.join(w for w, _ in self.programs)}")

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """The coordinates that the plan covers, in grid order."""
        return tuple(Coordinate(d, p) for d in self.pipelines for p in range(self.placement.grid.stages))

    def __str__(self) -> str:
        """The text form, which :meth:`parse` reads back equal."""
        lines = [
            f"mode {self.mode.value}",
            f"micro_batches {self.micro_batches}",
            f"pipelines {' '.join(map(str, self.pipelines))}",
            f"placement {json.dumps(self.placement.to_json())}",
        ]
        for worker, program in self.programs:
            lines.append(f"program {json.dumps(worker)}")
            lines.extend(f"  {instruction}" for instruction in program)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form back. Raises ValueError, naming the line, for anything else."""
        header: dict[str, str] = {}
        programs: list[tuple[WorkerId, list[Instruction]]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                if line.startswith("  "):
                    programs[-1][1].append(Instruction.parse(line.strip()))
                elif line.startswith("program "):
                    programs.append((json.loads(line.removeprefix("program ")), []))
                elif line:
                    key, _, value = line.partition(" ")
                    header[key] = value
            except (ValueError, IndexError) as error:
                raise ValueError(f"line {number} of the plan, {line!r}: {error}") from error
        return cls._from_parts(header, programs)

    @classmethod
    def _from_parts(cls, header: Mapping[str, str], programs: Iterable[tuple[WorkerId, list[Instruction]]]) -> Plan:
        expected = {"mode", "micro_batches", "pipelines", "placement"}
        if set(header) != expected:
            raise ValueError(f"a plan begins with the lines {', '.join(sorted(expected))}; got {', '.join(header)}")
        return cls(
            placement=Placement.from_json(json.loads(header["placement"])),
            micro_batches=int(header["micro_batches"]),
            programs=tuple((worker, tuple(program)) for worker, program in programs),
            mode=Mode(header["mode"]),
            pipelines=tuple(int(d) for d in header["pipelines"].split()),
        )
