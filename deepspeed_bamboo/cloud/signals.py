"""Signals as notices: how SLURM and Kubernetes say that a machine goes.

Python runs a signal handler only when the main thread gets to it, which it doesn't while it waits in
C code. The interpreter's C handler however writes the signal's number to a file descriptor at once,
whatever the main thread does; a side thread reads it there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from deepspeed_bamboo.cloud.notice import Notice
from deepspeed_bamboo.errors import ConfigError

GRACE_VARIABLE = "BAMBOO_GRACE_SECONDS"
DEFAULT_GRACE_SECONDS = 30.0  # of Kubernetes (terminationGracePeriodSeconds) and of SLURM (KillWait)

_LOOK_UP_SECONDS = 0.25


class SignalSource:
    """Each arrival of one of ``signals`` is a notice of kind ``preemption``, ``grace_seconds`` before the end.

    :meth:`install` before, :meth:`remove` after; both in the main thread. In between the signals no
    longer end the process: whoever takes the notice does, when the work is safe. Other signals keep
    their handlers, and a wake-up descriptor that somebody else had set (asyncio) still gets every number.
    """

    name = "signal"
    interval_seconds = 0.0  # poll waits itself

    def __init__(
        self,
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        handler: Callable[[int, FrameType | None], Any] | None = None,
    ) -> None:
        """``handler``: what the main thread does with such a signal besides, when it gets to it; default nothing."""
        self._grace_seconds = grace_seconds
        self._signals = tuple(signals)
        self._handler = handler or _do_nothing
        self._former_handlers: dict[signal.Signals, Any] = {}
        self._former_descriptor = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        """Begin to listen. Raises ConfigError outside the main thread; a second call changes nothing."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"signals can't be taken in thread {threading.current_thread().name!r}: Python lets only the "
                "main thread do so; call SignalSource.install there"
            )
        if self._sockets is not None:
            return
        self._sockets = reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._former_handlers = {number: signal.signal(number, self._handler) for number in self._signals}
        _leave_to_parent(self)

    def remove(self) -> None:
        """Put back what was there. Main thread only, after the watcher was stopped; a second call changes nothing."""
        if self._sockets is None:
            return
        self._put_back(self._sockets)

    def _put_back(self, sockets: tuple[socket.socket, socket.socket]) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._former_descriptor)
        for end in sockets:
            end.close()
        self._sockets = None

    def poll(self, stop: threading.Event) -> Sequence[Notice]:
        """Wait a quarter of a second at most for signals. Nothing before :meth:`install` or after :meth:`remove`."""
        sockets = self._sockets
        if sockets is None:
            stop.wait(_LOOK_UP_SECONDS)
            return ()
        try:
            ready, _, _ = select.select([sockets[0]], [], [], _LOOK_UP_SECONDS)
            numbers = sockets[0].recv(4096) if ready else b""
        except (OSError, ValueError):  # removed meanwhile
            return ()
        if numbers and self._former_descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(self._former_descriptor, numbers)
        arrived = [number for number in self._signals if number in numbers]
        deadline = time.monotonic() + self._grace_seconds
        return [Notice("preemption", deadline, f"received {number.name}", self.name) for number in arrived]


def grace_seconds_from(environment: Mapping[str, str]) -> float:
    """BAMBOO_GRACE_SECONDS: seconds between the signal and the end, 30 if unset. Raises ConfigError for no number."""
    text = environment.get(GRACE_VARIABLE, "")
    if not text:
        return DEFAULT_GRACE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"{GRACE_VARIABLE} is {text!r}; it is the number of seconds between the signal and the end, from 0 up"
        )
    return seconds


def _leave_to_parent(source: SignalSource) -> None:
    """A forked child must neither swallow these signals nor write its own into the parent's descriptor."""
    owner, known = os.getpid(), weakref.ref(source)

    def in_child() -> None:
        forked = known()
        if forked is not None and os.getppid() == owner:
            forked.remove()

    os.register_at_fork(after_in_child=in_child)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler has to exist, or the signal would end the process."""
