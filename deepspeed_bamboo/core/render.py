"""A timeline as text: one row per coordinate (and worker), one column per time slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import COMPUTE, Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.timeline import Timed, length

LEGEND = (
    "F n, B n: forward, backward of micro-batch n; f n, b n: redundant, of the shadowed next stage; . idle; - goes on"
)

_Row = tuple[WorkerId, Coordinate | None, bool]  # worker, coordinate, whether the row is a shadow's own


def text_grid(
    timeline: Iterable[Timed],
    *,
    placement: Placement,
    pipelines: Iterable[int] | None = None,
    guilty: Timed | None = None,
    first_slot: int = 0,
) -> str:
    """Draw the compute passes of ``timeline``, from ``first_slot`` on, for ``pipelines`` (default: all).

    FRC and BRC stand in the row of the coordinate whose output they use, or in a row of their own,
    marked ``~``, when that is on another worker. ``guilty`` is drawn too, whatever its op, with a ``!``.
    """
    shown = frozenset(range(placement.grid.pipelines) if pipelines is None else pipelines)
    passes = _passes(timeline, shown)
    rows = _rows(placement, passes=passes, pipelines=shown)
    if guilty is not None:
        rows = tuple(dict.fromkeys((*rows, _row(guilty, placement=placement, rows=rows))))
    slots = max(length(passes), 1 if guilty is None else guilty.start + 1)
    cells: dict[_Row, list[str]] = {row: ["."] * slots for row in rows}
    for timed in passes:
        row = cells[_row(timed, placement=placement, rows=rows)]
        row[timed.start : timed.end] = [cell_text(timed.instruction)] + ["-"] * (timed.end - timed.start - 1)
    if guilty is not None:
        cells[_row(guilty, placement=placement, rows=rows)][guilty.start] = "!" + cell_text(guilty.instruction)
    return _table(cells, first_slot=first_slot, slots=slots)


def cell_text(instruction: Instruction) -> str:
    """A few characters for an instruction: ``F3`` for FNC of micro-batch 3."""
    letters = {
        Op.FNC: "F",
        Op.BNC: "B",
        Op.FRC: "f",
        Op.BRC: "b",
        Op.LOAD: "L",
        Op.SEND_ACTIVATION: "SA",
        Op.RECV_ACTIVATION: "RA",
        Op.SEND_GRAD: "SG",
        Op.RECV_GRAD: "RG",
    }
    if instruction.op not in letters:
        return instruction.op.value
    return f"{letters[instruction.op]}{instruction.micro_batch}"


def grid_rows(
    timeline: Iterable[Timed], *, placement: Placement, pipelines: Iterable[int] | None = None
) -> tuple[tuple[str, tuple[Timed, ...]], ...]:
    """The rows that :func:`text_grid` draws: label, and the passes in it in the order in which they start."""
    shown = frozenset(range(placement.grid.pipelines) if pipelines is None else pipelines)
    passes = _passes(timeline, shown)
    rows = _rows(placement, passes=passes, pipelines=shown)
    members: dict[_Row, list[Timed]] = {row: [] for row in rows}
    for timed in sorted(passes, key=lambda timed: timed.start):
        members[_row(timed, placement=placement, rows=rows)].append(timed)
    return tuple((_label(row), tuple(timed)) for row, timed in members.items())


def bubble_share(timeline: Iterable[Timed], *, workers: int) -> float:
    """The share of all slots of all ``workers``, from the first to the last pass, in which they compute nothing."""
    passes = tuple(timeline)
    total = workers * length(passes)
    return 1 - sum(timed.end - timed.start for timed in passes) / total if total else 0.0


def _passes(timeline: Iterable[Timed], pipelines: frozenset[int]) -> tuple[Timed, ...]:
    return tuple(
        t
        for t in timeline
        if t.instruction.op in COMPUTE
        and t.instruction.coordinate is not None
        and t.instruction.coordinate.pipeline in pipelines
    )


def _rows(placement: Placement, *, passes: Iterable[Timed], pipelines: frozenset[int]) -> tuple[_Row, ...]:
    hosted: tuple[_Row, ...] = tuple((w, c, False) for c, w in placement.owners if c.pipeline in pipelines)
    apart = dict.fromkeys(_row(t, placement=placement, rows=hosted) for t in passes)
    return tuple(dict.fromkeys((*hosted, *sorted(apart, key=str))))


def _row(timed: Timed, *, placement: Placement, rows: Sequence[_Row]) -> _Row:
    coordinate, worker = timed.instruction.coordinate, timed.worker
    if coordinate is None:
        return next((row for row in rows if row[0] == worker), (worker, None, False))
    if timed.instruction.op not in (Op.FRC, Op.BRC):
        return (worker, coordinate, False)
    beside = (worker, placement.grid.predecessor(coordinate), False)
    return beside if beside in rows else (worker, coordinate, True)


def _table(cells: Mapping[_Row, list[str]], *, first_slot: int, slots: int) -> str:
    labels = {row: _label(row) for row in cells}
    margin = max(map(len, labels.values()), default=0)
    width = max([len(text) for row in cells.values() for text in row[first_slot:]] + [len(str(slots - 1))])
    head = " " * margin + "".join(f" {slot:>{width}}" for slot in range(first_slot, slots))
    lines = [
        f"{labels[row]:<{margin}}" + "".join(f" {text:>{width}}" for text in texts[first_slot:])
        for row, texts in cells.items()
    ]
    return "\n".join([head, *lines])


def _label(row: _Row) -> str:
    worker, coordinate, apart = row
    return worker if coordinate is None else f"{'~' if apart else ''}{coordinate} {worker}"
