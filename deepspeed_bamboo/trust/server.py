"""A TCP server that talks to nobody who does not know the job secret, and is not held up by anybody either."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

from deepspeed_bamboo.trust.handshake import SECONDS, StrangerError, admit, prove
from deepspeed_bamboo.trust.relay import shut_down

logger = logging.getLogger(__name__)
_MOST_UNPROVED = 256
_PAUSE_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = 60


class GuardedServer:
    """Listens on one address, and calls ``serve`` with every connection whose client has proved itself.

    Each connection has a thread of its own, and a few seconds to prove itself; of too many that have not, the oldest
    is dropped. ``serve`` owns its connection, which is closed when it returns; its OSError ends that connection only.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: str,
        purpose: str,
        serve: Callable[[socket.socket], None],
        encryption: ssl.SSLContext | None = None,
    ) -> None:
        """``port`` 0: any. ``encryption``: all connections are encrypted with it, from their first byte.

        Raises OSError where nobody can listen there.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._secret, self._purpose, self._serve, self._encryption = secret, purpose, serve, encryption
        self._lock = threading.Lock()
        self._unproved: dict[int, socket.socket] = {}
        self._proved: set[socket.socket] = set()
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._accept, name=f"bamboo-{purpose}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and end what there is. May be called twice, and from ``serve``."""
        with self._lock:
            self._closed = self._ended = True
            connections = [*self._unproved.values(), *self._proved]
        for connection in (self._listener, *connections):
            shut_down(connection)
        self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(SECONDS)

    def stop_listening(self) -> None:
        """Take no further connections; those that there are go on."""
        self._closed = True
        shut_down(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        number = 0
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_SECONDS)  # out of descriptors: some will be free again
                continue
            number += 1
            with self._lock:
                self._unproved[number] = connection
                surplus = len(self._unproved) > _MOST_UNPROVED
                oldest = self._unproved.pop(next(iter(self._unproved))) if surplus else None
            if oldest is not None:
                shut_down(oldest)
            name = f"bamboo-{self._purpose}-{number}"
            threading.Thread(target=self._handle, args=(number, connection), name=name, daemon=True).start()

    def _handle(self, number: int, connection: socket.socket) -> None:
        with contextlib.ExitStack() as ends:
            ends.enter_context(connection)
            try:
                _tune(connection)
                if self._encryption is not None:
                    connection = ends.enter_context(self._encrypted(number, connection, self._encryption))
                admit(connection, self._secret, purpose=self._purpose)
            except (OSError, StrangerError) as error:
                logger.info("a connection to %s was refused: %s", self._purpose, error)
                return
            finally:
                with self._lock:
                    self._unproved.pop(number, None)
            with self._lock:
                if self._ended:
                    return
                self._proved.add(connection)
            try:
                self._serve(connection)
            except OSError as error:
                logger.info("a connection to %s ended: %s", self._purpose, error)
            finally:
                with self._lock:
                    self._proved.discard(connection)

    def _encrypted(self, number: int, connection: socket.socket, encryption: ssl.SSLContext) -> ssl.SSLSocket:
        """What takes the place of ``connection``, once both sides have agreed on keys. Raises as :func:`connect`."""
        connection.settimeout(SECONDS)
        encrypted = encryption.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            with self._lock:
                if number not in self._unproved:
                    raise StrangerError("too many others came meanwhile")
                self._unproved[number] = encrypted
            encrypted.do_handshake()
        except BaseException:
            encrypted.close()
            raise
        return encrypted


def connect(
    host: str,
    port: int,
    *,
    secret: str,
    purpose: str,
    within_seconds: float = SECONDS,
    encryption: ssl.SSLContext | None = None,
) -> socket.socket:
    """A connection to a :class:`GuardedServer` of the same job and purpose, encrypted as that is.

    Raises OSError, which ssl.SSLError is, and StrangerError.
    """
    connection = socket.create_connection((host, port), timeout=within_seconds)
    try:
        _tune(connection)
        if encryption is not None:
            connection = encryption.wrap_socket(connection)  # within the same time limit
        prove(connection, secret, purpose=purpose, within_seconds=within_seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def _tune(connection: socket.socket) -> None:
    """Short messages go at once; a connection that nobody uses for hours stays known to what is between its ends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
