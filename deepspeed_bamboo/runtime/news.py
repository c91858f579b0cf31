"""One line for the person who watches: what has happened to the job, with the time of day."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def tell(engine: BambooPipelineEngine, text: str) -> None:
    """Print ``text`` to stderr, under the name of this worker."""
    print(f"[bamboo {time.strftime('%H:%M:%S')} {engine.session.worker}] {text}", file=sys.stderr, flush=True)


def tell_once(engine: BambooPipelineEngine, text: str) -> None:
    """As :func:`tell`, on the one worker that reports for all."""
    if engine.is_reporter:
        tell(engine, text)
