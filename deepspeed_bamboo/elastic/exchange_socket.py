"""The exchange between machines: rank 0 answers at the launcher's master address and port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from deepspeed_bamboo.elastic.boot import Boot, pack, unpack
from deepspeed_bamboo.elastic.errors import ExchangeError

_GREETING = b"bamboo 1 "
_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
_JOINING = (
    "a job that runs already is joined from another machine through coordinator.endpoints only, by a command for this "
    "machine alone (no --hostfile and --node_rank) with its --job NAME"
)


class SocketExchange:
    """Rank 0 serves one line to every slot that asks, until all have had it or :meth:`close`."""

    def __init__(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        rank: int,
        tell: Callable[[str], None] = lambda text: None,
        told_after_seconds: float = 10.0,
    ) -> None:
        """``tell`` hears once, after so many seconds, that rank 0 is waited for."""
        self._address = address
        self._port = port
        self._rank = rank
        self._tell, self._told_after_seconds = tell, told_after_seconds
        self._others = set(range(1, world_size))
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def give(self, boot: Boot) -> None:
        self._serve(pack(boot))

    def refuse(self) -> None:
        """Serve the refusal for a moment: slots that come later find nobody and their launchers end them."""
        with contextlib.suppress(ExchangeError):
            self._serve(pack(None))
            time.sleep(0.5)
            self.close()

    def take(self, *, within_seconds: float) -> Boot:
        start = time.monotonic()
        reason, told = "no attempt was made", False
        while (waited := time.monotonic() - start) < within_seconds:
            if waited > self._told_after_seconds and not told:
                told = True
                self._tell(
                    f"waiting for rank 0 at {self._address}:{self._port}, {within_seconds:.0f} s at most ({reason}). "
                    f"It answers only while its job starts: {_JOINING}"
                )
            try:
                with socket.create_connection((self._address, self._port), timeout=_ANSWER_SECONDS) as connection:
                    connection.sendall(_GREETING + str(self._rank).encode() + b"\n")
                    line = connection.makefile("rb").readline()
                if line.endswith(b"\n"):
                    return unpack(line)
                reason = "whoever listens there is no rank 0 of such a job"
            except OSError as error:
                reason = str(error)
            time.sleep(_RETRY_SECONDS)
        raise ExchangeError(
            f"rank 0 at {self._address}:{self._port} gave no answer within {within_seconds:.0f} s ({reason}); "
            "check that the same command was given there and that this machine can reach it, or choose another port "
            f"with the launcher's --master_port. Rank 0 answers only while its job starts: {_JOINING}"
        )

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._thread is not None:
            self._thread.join()

    def _serve(self, line: bytes) -> None:
        try:
            self._listener = socket.create_server(("", self._port), backlog=128)
        except OSError as error:
            raise ExchangeError(
                f"port {self._port} cannot be used on this machine ({error.strerror}); "
                f"choose another with the launcher's --master_port"
            ) from error
        self._thread = threading.Thread(
            target=self._answer, args=(self._listener, line), name="bamboo-exchange", daemon=True
        )
        self._thread.start()

    def _answer(self, listener: socket.socket, line: bytes) -> None:
        waiting = set(self._others)
        while waiting and self._listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_SECONDS)
                greeting = connection.makefile("rb").readline(64)
                if greeting.startswith(_GREETING) and greeting[len(_GREETING) :].strip().isdigit():
                    connection.sendall(line)
                    waiting.discard(int(greeting[len(_GREETING) :]))
        listener.close()
