"""One step of a worker's program, as a small value with a text form.

``Instruction.parse(str(instruction)) == instruction``. The habit is that of torch's
``distributed/pipelining/schedules.py`` (a schedule is data); the words are those of docs/architecture.md.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import NamedTuple

from deepspeed_bamboo.core.grid import Coordinate


class Op(enum.Enum):
    """What an instruction does. The first group acts on one coordinate and micro-batch, the second on the worker."""

    LOAD = "LOAD"  # take the micro-batch's input (first stage) or label (last stage) from the data
    FNC = "FNC"  # normal forward
    BNC = "BNC"  # normal backward
    FRC = "FRC"  # redundant forward, of a coordinate whose shadow is here
    BRC = "BRC"  # redundant backward
    SEND_ACTIVATION = "SEND_ACTIVATION"  # the coordinate's output, to the next stage
    RECV_ACTIVATION = "RECV_ACTIVATION"  # the coordinate's input, from the previous stage
    SEND_GRAD = "SEND_GRAD"  # the gradient of the coordinate's input, to the previous stage
    RECV_GRAD = "RECV_GRAD"  # the gradient of the coordinate's output, from the next stage

    REDUCE_TIED = "REDUCE_TIED"
    REDUCE = "REDUCE"
    MIRROR = "MIRROR"
    COMMIT = "COMMIT"
    STEP = "STEP"

    # Members are singletons: hash them as such, since programs look ops up at every instruction.
    __hash__ = object.__hash__


# The end of every training program: in this order on every worker, all of it, after everything else (architecture 5).
TAIL = (Op.REDUCE_TIED, Op.REDUCE, Op.MIRROR, Op.COMMIT, Op.STEP)

COMPUTE = frozenset({Op.FNC, Op.BNC, Op.FRC, Op.BRC})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRAD})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRAD})

_TO_SHADOW = "shadow"


class Instruction(NamedTuple):
    """``op`` on micro-batch ``micro_batch`` of ``coordinate``; both None for the ops of ``TAIL``.

    ``coordinate`` is the one whose state the instruction uses: the sender's for a SEND, the receiver's
    for a RECV, the shadowed one for FRC and BRC. ``to_shadow`` is for SEND and RECV only: the message
    feeds the receiving coordinate's shadow instead of the coordinate.

    Text form: ``FNC 0.2 3``, ``SEND_GRAD 0.2 3 shadow``, ``STEP``.
    """

    op: Op
    coordinate: Coordinate | None = None
    micro_batch: int | None = None
    to_shadow: bool = False

    def __str__(self) -> str:
        if self.coordinate is None:
            return self.op.value
        text = f"{self.op.value} {self.coordinate} {self.micro_batch}"
        return f"{text} {_TO_SHADOW}" if self.to_shadow else text

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read the text form back. Raises ValueError, which says how to write it, for anything else."""
        word, *rest = text.split()[:5] or [""]
        try:
            op = Op(word)
        except ValueError:
            raise ValueError(
                f"{text!r} is no instruction; begin with one of {', '.join(o.value for o in Op)}"
            ) from None
        if op in TAIL:
            if rest:
                raise ValueError(f"{text!r} is no instruction; {word} covers the whole worker, write it alone")
            return cls(op)
        to_shadow = rest[2:] == [_TO_SHADOW] and op in SENDS | RECEIVES
        if len(rest) != (3 if to_shadow else 2) or not rest[1].isdigit():
            raise ValueError(f"{text!r} is no instruction; write {word} PIPELINE.STAGE MICRO_BATCH, as in {word} 0.2 3")
        return cls(op, Coordinate.parse(rest[0]), int(rest[1]), to_shadow)


@lru_cache(maxsize=16384)
def row(op: Op, coordinate: Coordinate, micro_batches: int, to_shadow: bool = False) -> tuple[Instruction, ...]:
    """``op`` of ``coordinate`` on micro-batches 0 to ``micro_batches - 1``, made once: all plans share these values."""
    return tuple(Instruction(op, coordinate, m, to_shadow) for m in range(micro_batches))
