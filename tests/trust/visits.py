"""A worker's job with a pause in it, in which strangers visit; and what strangers try."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - another user may not be able to read the library any more
import itertools
import os
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.runtime import models
from tests.runtime.scenarios import Training, build

NOBODY = 65534
GREETING_BYTES = 40  # what a guarded server says to anybody: who it is, and a number
PATIENCE_SECONDS = 60.0


def train_with_visitors(training: Training) -> dict[str, Any]:
    """As ``scenarios.train``; after the first step each worker says who it is, and waits until visitors are gone."""
    engine = build(training)
    iterator = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    folder = Path(os.environ["TEST_DIRECTORY"])
    losses = [float(engine.train_batch(iterator))]
    if training.faults is not None:
        note = folder / f"here{engine.global_rank}"
        note.write_text(str(os.getpid()), encoding="utf-8")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (folder / "gone").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    losses += [float(engine.train_batch(iterator)) for _ in itertools.repeat(None, training.steps - 1)]
    result = {"losses": losses, "digest": engine.state_digest(), "epoch": engine.epoch}
    engine.close()
    return result


def messages() -> Iterable[bytes]:
    """What somebody without the secret may say: nothing, other protocols, what earlier versions took, and noise."""
    return (
        b"",
        b"bamboo 1 1\n",
        b"bamboo 2" + b"\0" * 64,
        b"GET /v3/kv/range HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
        b"\0" * 8,
        (2**40).to_bytes(8, "little"),
        # torch's TCPStore: VALIDATE with its magic number, then SET of a key
        bytes([0]) + (0x3C85F7CE).to_bytes(4, "little") + bytes([1]) + (1).to_bytes(8, "little") + b"k",
        os.urandom(4096),
    )


def answers(listeners: Sequence[tuple[str, int]]) -> list[tuple[tuple[str, int], bytes]]:
    """What each of ``listeners`` says to each of :func:`messages` and in an encrypted connection, with its address.

    Nothing where there is no connection. All are asked at once, since those that say nothing are waited for.
    """
    asked = [(address, message) for address in listeners for message in (*messages(), None)]
    with ThreadPoolExecutor(max_workers=64) as pool:
        return list(pool.map(lambda one: (one[0], _answer(*one)), asked))


def _answer(address: tuple[str, int], message: bytes | None) -> bytes:
    """``message`` None: an encrypted one."""
    if message is None:
        return _answer_encrypted(address)
    content = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2.0) as connection:
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while piece := connection.recv(65536):
            content += piece
    return content


def _answer_encrypted(address: tuple[str, int]) -> bytes:
    """To somebody who takes any certificate."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    content = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2.0) as connection:
        with trusting.wrap_socket(connection) as encrypted:
            encrypted.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(100))
            while piece := encrypted.recv(65536):
                content += piece
    return content


def as_somebody(user: int, action: Callable[[], Any], *, enter: Callable[[], None] = lambda: None) -> Any:
    """What ``action`` returns in a child of that user; text, or whatever has one. Fails where the child does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as pipe:
                try:
                    enter()
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                    pipe.write(str(action()))
                    code = 0
                except BaseException:  # noqa: BLE001 - it has to be told by this process, and to end it
                    pipe.write(traceback.format_exc())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child of user {user} failed: {text}"
    return text
