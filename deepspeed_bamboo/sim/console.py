"""The console that tables are written to."""

from __future__ import annotations

import sys

from rich.console import Console

_FILE_WIDTH = 160


def table_console() -> Console:
    """A console as wide as the terminal; in a file or a pipe wide enough that no figure is cut."""
    return Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
