"""A slot that is told to end before its agent hears signals: it removes what it has started, and ends quietly."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_CLEANING_UP_SECONDS = 3.0


@contextlib.contextmanager
def cleaning_up_when_told_to_end() -> Iterator[None]:
    """Until the agent hears signals: leave by SystemExit, so that what was started so far is removed.

    More signals don't interrupt that; afterwards they end the process without a word, as it does anyway. A library
    that is being imported may swallow the SystemExit; then the process ends in a few seconds all the same, before
    DeepSpeed's launcher has waited half a minute for it. Or its half-done import fails for that reason, with an error
    that would only lead astray.
    """
    told: list[int] = []
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def handle_by(handler: Any) -> None:
        for number in numbers:
            signal.signal(number, handler)

    def leave(number: int, frame: object) -> None:
        told.append(number)
        handle_by(signal.SIG_IGN)
        at_last = threading.Timer(_CLEANING_UP_SECONDS, os._exit, args=(128 + number,))
        at_last.daemon = True
        at_last.start()
        raise SystemExit(128 + number)

    handle_by(leave)
    try:
        yield
    except Exception:
        if told:
            raise SystemExit(128 + told[0]) from None
        raise
    finally:
        handle_by(signal.SIG_DFL)
