"""Between which coordinates the messages of an iteration travel, and what they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import SENDS, Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId

_PRODUCERS = frozenset({Op.FNC, Op.BNC})


@dataclasses.dataclass(frozen=True)
class IterationContext:
    """What is constant during one pass over a program."""

    placement: Placement
    activity: int
    step: int
    training: bool
    micro_batches: int
    for_shadow: bool = False


def key_of(kind: str, sender: Coordinate, micro_batch: int, context: IterationContext) -> str:
    """The name of one message: an "activation" or a "gradient" of a micro-batch from ``sender``."""
    suffix = "/shadow" if context.for_shadow else ""
    return f"{context.activity}/{kind}/{sender}/{micro_batch}{suffix}"


def kind_of(name: str, sender: Coordinate, context: IterationContext) -> str:
    """What messages have in common that have the same shapes and dtypes."""
    return f"{name}/{sender}/{context.training}/{context.for_shadow}"


def sends_behind(program: Sequence[Instruction]) -> dict[tuple[Op, Coordinate | None, int | None], list[Instruction]]:
    """For every pass of ``program`` the sends that come right after it."""
    result: dict[tuple[Op, Coordinate | None, int | None], list[Instruction]] = {}
    last: Instruction | None = None
    for instruction in program:
        if instruction.op not in SENDS:
            last = instruction
        elif last is not None and last.op in _PRODUCERS and _same_result(last, instruction):
            result.setdefault((last.op, last.coordinate, last.micro_batch), []).append(instruction)
    return result


def _same_result(produced: Instruction, send: Instruction) -> bool:
    return produced.coordinate == send.coordinate and produced.micro_batch == send.micro_batch


def sender_of(receive: Instruction) -> Coordinate:
    """The coordinate whose output or gradient the instruction ``receive`` receives."""
    if receive.coordinate is None:
        raise ValueError(f"{receive} is not an instruction of a coordinate")
    step = -1 if receive.op is Op.RECV_ACTIVATION else 1
    return Coordinate(receive.coordinate.pipeline, receive.coordinate.stage + step)


def receiver_of(send: Instruction, context: IterationContext) -> WorkerId:
    """The worker for which the instruction ``send`` sends."""
    if send.coordinate is None:
        raise ValueError(f"{send} is not an instruction of a coordinate")
    step = 1 if send.op is Op.SEND_ACTIVATION else -1
    neighbour = Coordinate(send.coordinate.pipeline, send.coordinate.stage + step)
    return holder_of(neighbour, dataclasses.replace(context, for_shadow=send.to_shadow))


def holder_of(receiver: Coordinate, context: IterationContext) -> WorkerId:
    """The worker for which a message to ``receiver`` is meant: its owner, or its shadow's holder."""
    if not context.for_shadow:
        return context.placement.owner(receiver)
    holder = context.placement.shadow(receiver)
    if holder is None:
        raise RuntimeError(f"a message for the shadow of {receiver}, which has none: the plan is wrong")
    return holder


def receives(coordinate: Coordinate, *, me: WorkerId, context: IterationContext) -> bool:
    """Whether another worker sends to ``coordinate`` of ``me``, so that its passes may be taken back."""
    placement = context.placement
    beside = (coordinate.stage - 1, coordinate.stage + 1)
    return any(
        placement.owner(Coordinate(coordinate.pipeline, stage)) != me
        for stage in beside
        if 0 <= stage < placement.grid.stages
    )
