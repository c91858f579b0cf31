"""A worker lays tensors out by key for others to fetch, in the store that every worker serves anyway.

Receivers need not be ready, so this suits what a script exchanges between iterations: a worker that comes late, or
again after a loss, finds what it needs as long as it is laid out.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links

Tensors = list[torch.Tensor]
PIECE_BYTES = 2**24  # of one value in a store, whose messages have a limit
_COUNT = struct.Struct("<I")


class Board:
    """This worker's side of it. ``store`` is its own, which ``links`` reaches on others."""

    def __init__(self, store: Any, *, links: Links, me: WorkerId, interruption: Interruption) -> None:
        self._store = store
        self._links = links
        self._me = me
        self._interruption = interruption
        self._out: dict[str, int] = {}  # of how many pieces each is
        self._awaited: dict[WorkerId, str] = {}

    @property
    def awaited(self) -> dict[WorkerId, str]:
        """By worker the key under which it has laid out nothing yet, while this worker waits for that."""
        return dict(self._awaited)

    def lay_out(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let others fetch copies of ``tensors`` under ``key``. Never waits."""
        packed = pack(tensors)
        pieces = [packed[start : start + PIECE_BYTES] for start in range(0, len(packed), PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], start=1):
            self._store.set(_piece_key(key, number), piece)
        self._store.set(key, _COUNT.pack(len(pieces)) + pieces[0])  # last: who finds it finds the others
        self._out[key] = len(pieces)

    def take_in(self, keys: Sequence[str]) -> None:
        """Lay these out no longer."""
        for key in keys:
            for number in range(self._out.pop(key, 0)):
                self._store.delete_key(_piece_key(key, number))

    def fetch(self, wanted: Mapping[WorkerId, str], *, remove: bool = False) -> dict[WorkerId, Tensors]:
        """What each worker has laid out under its key; waits until all have. ``remove``: they lay it out no longer.

        Raises PeerLostError for one that can't be reached, or what interrupts the wait.
        """

        awaited = self._awaited = dict(wanted)

        def get(worker: WorkerId, client: Any, key: str) -> bytes:
            return _read(client, key, remove=remove, begun=lambda: awaited.pop(worker, None))

        try:
            return _unpacked(self._ask(wanted, get))
        finally:
            self._awaited = {}

    def look(self, wanted: Mapping[WorkerId, str]) -> dict[WorkerId, Tensors]:
        """As :meth:`fetch`, of those only that have laid it out by now."""

        def get(_: WorkerId, client: Any, key: str) -> bytes | None:
            return _read(client, key) if client.check([key]) else None

        return _unpacked(self._ask(wanted, get))

    def _ask(self, wanted: Mapping[WorkerId, str], question: Any) -> dict[WorkerId, bytes | None]:
        answers: dict[WorkerId, bytes | None] = {}
        errors: dict[WorkerId, str] = {}

        def ask(worker: WorkerId, key: str) -> None:
            try:
                if worker == self._me:
                    answers[worker] = question(worker, self._store, key)
                else:
                    with self._links.store_of(worker) as client:
                        answers[worker] = question(worker, client, key)
            except (RuntimeError, ValueError, OSError, struct.error) as error:
                errors[worker] = cause_of(error)
            self._interruption.notify()

        # In threads of their own: a store that is gone answers late or never, and a wait in it can't be interrupted.
        for worker, key in wanted.items():
            threading.Thread(target=ask, args=(worker, key), name=f"bamboo-ask-{worker}", daemon=True).start()
        self._interruption.wait_until(lambda: bool(errors) or len(answers) == len(wanted))
        for worker, error in errors.items():
            raise PeerLostError(worker, error)
        return answers


def pack(tensors: Sequence[torch.Tensor]) -> bytes:
    """``tensors`` as bytes."""
    return encode([tensor.detach().to("cpu").contiguous() for tensor in tensors])


def unpack(data: bytes) -> Tensors:
    """Inverse of :func:`pack`. Raises MessageError for anything else."""
    tensors = decode(data)
    if not isinstance(tensors, list) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise MessageError("a worker has laid out something else than tensors")
    return tensors


def _unpacked(answers: Mapping[WorkerId, bytes | None]) -> dict[WorkerId, Tensors]:
    found = {}
    for worker, value in answers.items():
        if value is not None:
            try:
                found[worker] = unpack(value)
            except MessageError as error:
                raise PeerLostError(worker, str(error)) from error
    return found


def _read(client: Any, key: str, *, remove: bool = False, begun: Callable[[], object] = lambda: None) -> bytes:
    """All pieces of what lies under ``key``, once it is there; ``begun`` is called when it is."""
    head = bytes(client.get(key))
    begun()
    (count,) = _COUNT.unpack_from(head)
    packed = head[_COUNT.size :] + b"".join(bytes(client.get(_piece_key(key, number))) for number in range(1, count))
    if remove:
        for number in range(count):
            client.delete_key(_piece_key(key, number))
    return packed


def _piece_key(key: str, number: int) -> str:
    return f"{key}/piece {number}" if number else key
