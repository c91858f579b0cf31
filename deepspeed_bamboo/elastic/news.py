"""One line of an agent for the person who watches, with the time of day, as the workers have it in theirs."""

from __future__ import annotations

import sys
import time


def tell(text: str, *, rank: int | None = None) -> None:
    """Print ``text`` to stderr, under the slot's rank in the job if that is known."""
    who = "" if rank is None else f" rank {rank}"
    print(f"[bamboo {time.strftime('%H:%M:%S')}{who}] {text}", file=sys.stderr, flush=True)
