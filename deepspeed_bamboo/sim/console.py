"""The console that tables are written to."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_FILE_WIDTH = 160
_NO_LIMIT = 10_000


def table_console() -> Console:
    """A console as wide as the terminal; in a file or a pipe lines of text have a width of their own."""
    return Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)


def width_of(table: Table, console: Console) -> int:
    """How wide ``table`` is when no figure in it is cut; 0 for a file or a pipe, where that is no matter."""
    if not console.is_terminal:
        return 0
    return _natural_width(table, console)


def print_whole(table: Table, console: Console) -> None:
    """Print ``table`` as wide as it is, whatever the width of ``console``."""
    before = console.width
    console.width = max(before, _natural_width(table, console))
    try:
        console.print(table)
    finally:
        console.width = before


def _natural_width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(width=_NO_LIMIT), table).maximum
