"""Both sides of a fresh connection prove that they know the job secret, without saying it.

The server sends a number used once; the client sends one of its own and an HMAC over both; the server answers with
another HMAC. Each HMAC names its side and what the connection is for, so that none can be used a second time or
elsewhere. What follows on the connection is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

from deepspeed_bamboo.errors import BambooError

GREETING = b"bamboo 2"
SECONDS = 5.0
_NONCE_BYTES = 32
_MAC_BYTES = 32


class StrangerError(BambooError):
    """The other side of a connection has not proved that it knows the job secret."""


def prove(connection: socket.socket, secret: str, *, purpose: str, within_seconds: float = SECONDS) -> None:
    """As the client of ``connection``. Raises StrangerError unless both know the secret; OSError for a broken one."""
    deadline = time.monotonic() + within_seconds
    start = receive_exactly(connection, len(GREETING) + _NONCE_BYTES, deadline=deadline)
    if not start.startswith(GREETING):
        raise StrangerError("whoever listens there is no part of a job of deepspeed_bamboo")
    theirs, own = start[len(GREETING) :], os.urandom(_NONCE_BYTES)
    connection.sendall(GREETING + own + _mac(secret, purpose, "client", theirs, own))
    answer = receive_exactly(connection, _MAC_BYTES, deadline=deadline, refused="it does not know this secret")
    if not hmac.compare_digest(answer, _mac(secret, purpose, "server", own, theirs)):
        raise StrangerError("whoever listens there does not know the job's secret")
    connection.settimeout(None)


def admit(connection: socket.socket, secret: str, *, purpose: str, within_seconds: float = SECONDS) -> None:
    """As the server of ``connection``. Raises StrangerError unless the client knows the secret; OSError."""
    deadline = time.monotonic() + within_seconds
    own = os.urandom(_NONCE_BYTES)
    connection.settimeout(within_seconds)
    connection.sendall(GREETING + own)
    answer = receive_exactly(connection, len(GREETING) + _NONCE_BYTES + _MAC_BYTES, deadline=deadline)
    theirs, proof = answer[len(GREETING) : -_MAC_BYTES], answer[-_MAC_BYTES:]
    if not answer.startswith(GREETING) or not hmac.compare_digest(proof, _mac(secret, purpose, "client", own, theirs)):
        raise StrangerError("the client does not know the job's secret")
    connection.sendall(_mac(secret, purpose, "server", theirs, own))
    connection.settimeout(None)


def receive_exactly(
    connection: socket.socket, size: int, *, deadline: float, refused: str = "it closed the connection"
) -> bytes:
    """So many bytes, by then (monotonic). Raises StrangerError when the other side ends before, TimeoutError."""
    content = b""
    while len(content) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("it says nothing")
        connection.settimeout(remaining)
        try:
            piece = connection.recv(size - len(content))
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise StrangerError(f"whoever listens there refused the connection: {refused}")
        content += piece
    return content


def _mac(secret: str, purpose: str, side: str, *nonces: bytes) -> bytes:
    text = "\0".join(("bamboo handshake", purpose, side, "")).encode()
    return hmac.new(secret.encode(), text + b"".join(nonces), hashlib.sha256).digest()
