"""One line on stderr about what has happened to the job, with the time of day and the name of the worker or slot."""

from __future__ import annotations

import sys
import time


def tell(text: str, *, who: str = "") -> None:
    """Print ``text`` to stderr. ``who``: a worker, or a slot's agent; nothing where that is not known yet."""
    name = f" {who}" if who else ""
    say(f"[bamboo {time.strftime('%H:%M:%S')}{name}] {text}")


def say(text: object) -> None:
    """Print ``text`` to stderr, also where a script has replaced ``print`` to silence all ranks but the first."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
