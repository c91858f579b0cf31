"""For commands that run for days with nobody beside them: lines of what is new, and a word when they are ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Signalled", "Voice", "handling", "signals_raised"]


class Voice:
    """Says what is new, a line each. Where nobody can read it, the fleet is followed all the same."""

    def __init__(self) -> None:
        self._last = ""
        self._trouble = False

    def say(self, line: str) -> None:
        """What has happened."""
        with contextlib.suppress(OSError):
            print(line, flush=True)

    def condition(self, line: str = "", *, trouble: bool = False) -> None:
        """How things are: said once, until they are otherwise. No line: well."""
        if self._trouble and not trouble:
            self.say("etcd and AWS answer again")
        if line and line != self._last:
            self.say(line)
        self._last, self._trouble = line, trouble


class Signalled(BaseException):
    """A signal that ends this command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def handling(*numbers: signal.Signals, by: Callable[[int, Any], object]) -> Iterator[None]:
    """Inside, ``by`` gets these signals, where they are not ignored as under nohup. For the main thread."""
    known = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in known.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, by)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise Signalled for SIGTERM and SIGHUP."""

    def end(number: int, _: Any) -> None:
        raise Signalled(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handling(signal.SIGTERM, signal.SIGHUP, by=end):
        yield
