"""The exchange between machines: rank 0 answers slots that have the key, at the launcher's master address and port."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from deepspeed_bamboo.elastic.address import listening_address, reached_at
from deepspeed_bamboo.elastic.boot import Boot, pack, pack_refusal, unpack
from deepspeed_bamboo.elastic.errors import ExchangeError, LateError
from deepspeed_bamboo.elastic.outcome import REFUSED
from deepspeed_bamboo.errors import BambooError, MessageError
from deepspeed_bamboo.trust.handshake import StrangerError
from deepspeed_bamboo.trust.secret import derived, job_secret, make_key, missing_key, new_secret, read_key
from deepspeed_bamboo.trust.server import GuardedServer, connect

_PURPOSE = "start"
_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
# So long a secret may be refused: another job may have had the port a moment ago.
_REFUSED_SECONDS = 5.0
_LIMIT_BYTES = 1_000_000
_LONGEST_QUESTION_BYTES = 200
_JOINING = (
    "a running job can be joined from another machine only through coordinator.endpoints, by a command for this "
    "machine alone (no --hostfile and --node_rank) with its --job NAME"
)


class SocketExchange:
    """Rank 0 serves one line to every slot that has the key, until all have received it or :meth:`close`.

    A slot asks with a number of its own, and the answer begins with an HMAC of number and line: what it trusts, the
    certificate of the way to etcd among it, nobody between the machines can have changed.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        rank: int,
        tell: Callable[[str], None] = lambda text: None,
        told_after_seconds: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``tell`` is called once, after so many seconds, with the news that this slot waits for rank 0.

        ``environment``: says where the key is.
        """
        self._address = address
        self._port = port
        self._rank = rank
        self._tell, self._told_after_seconds = tell, told_after_seconds
        self._others = set(range(1, world_size))
        self._environment = os.environ if environment is None else environment
        self._server: GuardedServer | None = None

    def give(self, boot: Boot) -> None:
        # The secret itself never travels: all who may have it make it of the key.
        self._serve(pack(replace(boot, secret="")))

    def refuse(self, how: str = REFUSED) -> None:
        """Serve the refusal for a moment: slots that come later find nobody and their launchers end them."""
        with contextlib.suppress(BambooError):
            self._serve(pack_refusal(how))
            time.sleep(0.5)
            self.close()

    def take(self, *, within_seconds: float) -> Boot:
        start = time.monotonic()
        reason, told, refused_at, absent = "no attempt was made", False, 0.0, True
        while (waited := time.monotonic() - start) < within_seconds:
            if waited > self._told_after_seconds and not told:
                told = True
                self._tell(
                    f"waiting for rank 0 at {self._address}:{self._port}, {within_seconds:.0f} s at most ({reason}). "
                    f"It answers only while its job starts: {_JOINING}"
                )
            try:
                key = read_key(self._environment)
                if key is not None:
                    return self._ask(key)
                reason, absent = missing_key(self._environment), False
            except StrangerError as error:
                reason, refused_at, absent = str(error), refused_at or waited or 1e-9, False
                if waited - refused_at > _REFUSED_SECONDS:
                    break
            except (OSError, MessageError) as error:
                reason, refused_at, absent = str(error), 0.0, True
            time.sleep(_RETRY_SECONDS)
        raise (LateError if absent else ExchangeError)(
            f"rank 0 at {self._address}:{self._port} gave no answer within {min(waited, within_seconds):.0f} s "
            f"({reason}); check that the same command was given there, that this machine can reach it and has the same "
            "secret (docs/security.md), or choose another port with the launcher's --master_port. Rank 0 answers only "
            f"while its job starts: {_JOINING}"
        )

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _ask(self, key: str) -> Boot:
        """Raises OSError, StrangerError and MessageError."""
        host = reached_at(self._address)
        with connect(host, self._port, secret=key, purpose=_PURPOSE, within_seconds=_ANSWER_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            number = new_secret()
            connection.sendall(f"{self._rank} {number}\n".encode())
            answer = connection.makefile("rb").readline(_LIMIT_BYTES)
        if not answer.endswith(b"\n"):
            raise MessageError("rank 0 ended in the middle of its answer")
        signature, _, line = answer.partition(b" ")
        if not hmac.compare_digest(signature, _signature(key, number=number, line=line)):
            raise StrangerError("somebody between this machine and rank 0 has changed its answer")
        boot = unpack(line)
        return replace(boot, secret=job_secret(key, salt=boot.salt))

    def _serve(self, line: bytes) -> None:
        key = make_key(self._environment)
        waiting = set(self._others)

        def answer(connection: socket.socket) -> None:
            connection.settimeout(_ANSWER_SECONDS)
            rank, _, number = connection.makefile("rb").readline(_LONGEST_QUESTION_BYTES).strip().partition(b" ")
            if not rank.isdigit() or not number.isalnum():
                return
            connection.sendall(_signature(key, number=number.decode(), line=line) + b" " + line)
            waiting.discard(int(rank))
            if not waiting and self._server is not None:
                self._server.stop_listening()

        host = listening_address(self._address, environment=self._environment)
        try:
            self._server = GuardedServer(host, self._port, secret=key, purpose=_PURPOSE, serve=answer)
        except OSError as error:
            kind = LateError if error.errno == errno.EADDRINUSE else ExchangeError
            raise kind(
                f"port {self._port} of {host} cannot be used on this machine ({error.strerror}); "
                f"choose another with the launcher's --master_port"
            ) from error


def _signature(key: str, *, number: str, line: bytes) -> bytes:
    """Of rank 0's ``line``, for the slot that asked with this ``number``."""
    return derived(key, "start answer", number, hashlib.sha256(line).hexdigest()).encode()
