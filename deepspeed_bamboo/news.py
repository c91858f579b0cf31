"""One line on stderr about what has happened to the job, with the time of day and the name of the worker or slot."""

from __future__ import annotations

import sys
import time


def tell(text: str, *, who: str = "") -> None:
    """Print ``text`` to stderr. ``who``: a worker, or a slot's agent; nothing where that is not known yet."""
    name = f" {who}" if who else ""
    print(f"[bamboo {time.strftime('%H:%M:%S')}{name}] {text}", file=sys.stderr, flush=True)
