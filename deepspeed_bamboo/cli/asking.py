"""Asks people on the terminal whether they mean it."""

from __future__ import annotations

import sys


def agreed(question: str, *, otherwise: Exception) -> bool:
    """Whether the answer is yes. No answer (Ctrl-D) is a no. Raises ``otherwise`` where there is no terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise otherwise
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, UnicodeDecodeError):
        print()  # what follows begins on a line of its own
        return False
