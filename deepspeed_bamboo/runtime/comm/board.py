"""What a worker lays out for others to fetch: tensors by key, in the store that every worker serves anyway.

Nobody has to be ready for it, so it suits what a script exchanges between iterations: a worker that comes late, or
again after a loss, finds what it needs for as long as it is laid out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links

Tensors = list[torch.Tensor]


class Board:
    """This worker's side of it. ``store`` is its own, which ``links`` reaches on others."""

    def __init__(self, store: Any, *, links: Links, me: WorkerId, interruption: Interruption) -> None:
        self._store = store
        self._links = links
        self._me = me
        self._interruption = interruption
        self._out: set[str] = set()

    def lay_out(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let others fetch copies of ``tensors`` under ``key``. Never waits."""
        self._store.set(key, pack(tensors))
        self._out.add(key)

    def take_in(self, keys: Sequence[str]) -> None:
        """Lay these out no longer."""
        for key in keys:
            if key in self._out:
                self._out.discard(key)
                self._store.delete_key(key)

    def fetch(self, wanted: Mapping[WorkerId, str], *, remove: bool = False) -> dict[WorkerId, Tensors]:
        """What each worker has laid out under its key; waits until all have. ``remove``: they lay it out no longer.

        Raises PeerLostError for one that can't be reached, or what interrupts the wait.
        """

        def get(client: Any, key: str) -> bytes:
            found = bytes(client.get(key))
            if remove:
                client.delete_key(key)
            return found

        return {worker: unpack(value) for worker, value in self._ask(wanted, get).items() if value is not None}

    def look(self, wanted: Mapping[WorkerId, str]) -> dict[WorkerId, Tensors]:
        """As :meth:`fetch`, of those only that have laid it out by now."""

        def get(client: Any, key: str) -> bytes | None:
            return bytes(client.get(key)) if client.check([key]) else None

        return {worker: unpack(value) for worker, value in self._ask(wanted, get).items() if value is not None}

    def _ask(self, wanted: Mapping[WorkerId, str], question: Any) -> dict[WorkerId, bytes | None]:
        answers: dict[WorkerId, bytes | None] = {}
        errors: dict[WorkerId, str] = {}

        def ask(worker: WorkerId, key: str) -> None:
            try:
                if worker == self._me:
                    answers[worker] = question(self._store, key)
                else:
                    with self._links.store_of(worker) as client:
                        answers[worker] = question(client, key)
            except (RuntimeError, ValueError, OSError) as error:
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
    """``tensors`` as bytes: a line that describes them, then their content."""
    host = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
    head = json.dumps([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in host])
    parts = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"" for tensor in host]
    return b"\n".join([head.encode(), b"".join(parts)])


def unpack(data: bytes) -> Tensors:
    """Inverse of :func:`pack`. Raises ValueError for anything else."""
    head, _, content = data.partition(b"\n")
    tensors, offset = [], 0
    for name, shape in json.loads(head):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is no type of tensors")
        tensor = torch.empty(shape, dtype=dtype)
        size = tensor.numel() * dtype.itemsize
        if size:
            piece = torch.frombuffer(bytearray(content[offset : offset + size]), dtype=dtype)
            tensor.copy_(piece.view(tensor.shape))
        tensors.append(tensor)
        offset += size
    if offset != len(content):
        raise ValueError(f"{len(content)} bytes of content for tensors of {offset}")
    return tensors
