"""Values on a connection, one after the other: lists, texts, bytes and numbers, as msgpack with a length before it."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

from deepspeed_bamboo.errors import MessageError

_LENGTH = struct.Struct("<I")
_LIMIT_BYTES = 2**26
_PIECE_BYTES = 2**16


class Frames:
    """Both directions of ``connection``. Mostly a value comes with a single call to the operating system."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = bytearray()

    def send(self, value: Any) -> None:
        """Raises OSError."""
        content = msgpack.packb(value)
        self._connection.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> Any:
        """The next value, or None at the end. Raises MessageError for bytes that are none, OSError."""
        head = self._take(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _LIMIT_BYTES:
            raise MessageError(f"a request to a store of {size} bytes")
        content = self._take(size)
        if content is None:
            return None
        try:
            return msgpack.unpackb(content, ext_hook=_refuse)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise MessageError(f"a request to a store that is no message ({error})") from error

    def _take(self, size: int) -> bytes | None:
        while len(self._unread) < size:
            piece = self._connection.recv(_PIECE_BYTES)
            if not piece:
                return None
            self._unread += piece
        content = bytes(self._unread[:size])
        del self._unread[:size]
        return content


def _refuse(code: int, data: bytes) -> Any:
    raise MessageError(f"a request to a store with a value of kind {code}")
