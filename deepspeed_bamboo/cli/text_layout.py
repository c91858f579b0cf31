"""Text for a terminal of a given width, counted in its cells: a wide character takes two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

_GAP = "  "
_ELLIPSIS = "…"
_LEAST_CELLS = 8  # of a column that is cut


def printable(text: str) -> str:
    """``text`` on one line, with nothing in it that a terminal would obey: other users can write to etcd, too."""
    return "".join(char if char.isprintable() else " " for char in text)


def cut(text: str, cells: int) -> str:
    """``text`` in at most so many cells. What is left out is in the middle, since names often differ at their end."""
    if cell_len(text) <= cells:
        return text
    if cells <= 1:
        return _ELLIPSIS[:cells]
    tail = ""
    for char in reversed(text):
        if cell_len(char + tail) > cells // 2:
            break
        tail = char + tail
    head = set_cell_size(text, cells - 1 - cell_len(tail)).rstrip()
    return f"{head}{_ELLIPSIS}{tail}"


def padded(text: str, cells: int) -> str:
    """``text`` with spaces behind it, so many cells wide."""
    return text + " " * (cells - cell_len(text))


def wrapped(text: str, cells: int | None) -> list[str]:
    """``text`` in lines of at most so many cells (None: one line), broken between words; later ones are indented."""
    if cells is None or cell_len(text) <= cells:
        return [text]
    indent = text[: len(text) - len(text.lstrip())][: cells // 2]
    lines, line, is_new = [], indent, True
    for word in text.split():
        longer = f"{line}{'' if is_new else ' '}{word}"
        if not is_new and cell_len(longer) > cells:
            lines.append(line)
            longer = f"{indent}{_GAP}{word}"
        line, is_new = cut(longer, cells), False
    return [*lines, line]


@dataclass(frozen=True)
class Column:
    """A column of a table. ``gives_way``: the higher, the sooner it is left out; 0: never.

    ``repeats``: its content is also elsewhere, so it is left out before other columns are cut.
    ``whole``: it is never cut. ``prose``: it is cut at its end.
    """

    title: str
    cells: tuple[str, ...]
    gives_way: int = 0
    repeats: bool = False
    whole: bool = False
    prose: bool = False

    @property
    def width(self) -> int:
        """Of its widest cell, in cells."""
        return max(map(cell_len, (self.title, *self.cells)))

    @property
    def least(self) -> int:
        """How many cells it needs."""
        return self.width if self.whole else min(self.width, _LEAST_CELLS)

    def fitted(self, text: str, cells: int) -> str:
        """``text`` in so many cells."""
        if self.prose and cell_len(text) > cells:
            return f"{set_cell_size(text, cells - 1).rstrip()}{_ELLIPSIS}"
        return padded(cut(text, cells), cells)


def table(columns: Sequence[Column], cells: int | None) -> list[str]:
    """The lines of a table of at most so many cells (None: as wide as it is). Its first line has the titles, if any."""
    shown = list(columns)
    while cells is not None and (leaving := _to_leave_out(shown, cells)) is not None:
        shown.remove(leaving)
    widths = _widths(shown, cells)
    rows = list(zip(*(column.cells for column in shown), strict=True))
    if any(column.title for column in shown):
        rows.insert(0, tuple(column.title for column in shown))
    found = [
        _GAP.join(column.fitted(text, width) for column, text, width in zip(shown, row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return found if cells is None else [cut(line, cells) for line in found]


def _to_leave_out(columns: Sequence[Column], cells: int) -> Column | None:
    """The next column to leave out, where they are too wide together."""
    gaps = len(_GAP) * (len(columns) - 1)
    if sum(column.width for column in columns) + gaps <= cells:
        return None
    repeated = [column for column in columns if column.repeats]
    if repeated:
        return max(repeated, key=lambda column: column.gives_way)
    if sum(column.least for column in columns) + gaps <= cells:
        return None
    others = [column for column in columns if column.gives_way]
    return max(others, key=lambda column: column.gives_way) if others else None


def _widths(columns: Sequence[Column], cells: int | None) -> list[int]:
    """How wide each column is; the widest are cut first."""
    widths = [column.width for column in columns]
    while cells is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > cells:
        room = [width - column.least for column, width in zip(columns, widths, strict=True)]
        if max(room) <= 0:
            break
        widest = max((width, index) for index, width in enumerate(widths) if room[index] > 0)[1]
        widths[widest] -= 1
    return widths


def beside(left: Sequence[str], right: Sequence[str], cells: int, *, least: int) -> list[str] | None:
    """Both blocks side by side; None where fewer than ``least`` cells are left for the one on the right."""
    edge = max(map(cell_len, left), default=0) + 2 * len(_GAP)
    room = cells - edge
    if room < least:
        return None
    height = max(len(left), len(right))
    lefts, rights = ([*block, *[""] * (height - len(block))] for block in (left, right))
    return [f"{padded(one, edge)}{cut(other, room)}".rstrip() for one, other in zip(lefts, rights, strict=True)]
