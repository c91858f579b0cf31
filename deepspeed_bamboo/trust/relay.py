"""Passes on what comes from either of two connections to the other.

One thread does both directions, for an encrypted connection must not be read by one thread and written by another.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PIECE_BYTES = 2**16
_MOST_BYTES = 2**20  # that may wait for the other side; more stays with the sender

Needs = defaultdict[int, int]
"""By descriptor, the events of ``poll`` that somebody waits for."""


def relay(one: socket.socket, other: socket.socket) -> None:
    """Until either ends, or breaks; what it has sent before is passed on. Then both are shut down, and not closed."""
    for end in (one, other):
        end.setblocking(False)
    there, back = _Direction(one, other), _Direction(other, one)
    with contextlib.suppress(OSError):
        while not (there.is_over or back.is_over):
            needs: Needs = defaultdict(int)
            moved = [direction.move(needs) for direction in (there, back)]
            if not any(moved):
                _wait(needs)
    for end in (one, other):
        shut_down(end)


def shut_down(connection: socket.socket) -> None:
    """Ends what anybody waits for on it, from any thread; an encrypted one without a farewell.

    The method of encrypted ones would begin with forgetting that they are encrypted, while others may still send.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Direction:
    """From ``source`` to ``target``, neither of which blocks."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._waiting = bytearray()
        self._ended = False

    @property
    def is_over(self) -> bool:
        """All that the source will ever have sent is passed on."""
        return self._ended and not self._waiting

    def move(self, needs: Needs) -> bool:
        """Receive and send what is possible now; whether that was anything. Adds to ``needs`` what it waits for."""
        before = (len(self._waiting), self._ended)
        sent = 0
        if not self._ended and len(self._waiting) < _MOST_BYTES:
            piece = _now(lambda: self._source.recv(_PIECE_BYTES), self._source, select.POLLIN, needs)
            self._ended = piece == b""
            self._waiting += piece or b""
        after = (len(self._waiting), self._ended)
        if self._waiting:
            content = bytes(self._waiting[:_PIECE_BYTES])
            sent = _now(lambda: self._target.send(content), self._target, select.POLLOUT, needs) or 0
            del self._waiting[:sent]
        return sent > 0 or after != before


def _now(action: Callable[[], T], end: socket.socket, event: int, needs: Needs) -> T | None:
    """What ``action`` gives; None when it would have had to wait, for what is in ``needs`` then. Raises OSError."""
    try:
        return action()
    except BlockingIOError:
        needs[end.fileno()] |= event
    except ssl.SSLWantReadError:
        needs[end.fileno()] |= select.POLLIN
    except ssl.SSLWantWriteError:
        needs[end.fileno()] |= select.POLLOUT
    return None


def _wait(needs: Needs) -> None:
    poll = select.poll()
    for descriptor, events in needs.items():
        poll.register(descriptor, events)
    poll.poll()
