"""How a copy of a stage goes to another worker's memory: at once, or in pieces, no more than some bytes a second."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import ExpelledError, MessageError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.recovery.memory_parts import SealedPart

_MEGABYTE = 2**20
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 2**16, 2**22
_PIECE_SECONDS = 0.1


class Connected(Protocol):
    """The part of ``Links`` that is needed here."""

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send without waiting."""

    def receive(self, worker: WorkerId, key: str) -> Message:
        """The message ``key`` from ``worker``; waits for it."""


class Pace:
    """No more than so many bytes a second, over all that is sent since it was made.

    Args:
        megabytes_per_second: the limit, in units of 2**20 bytes; None: there is none.
        given_up: set when nothing is to be sent any more; ends waits.
        clock: in seconds.
    """

    def __init__(
        self,
        megabytes_per_second: float | None,
        *,
        given_up: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = None if megabytes_per_second is None else megabytes_per_second * _MEGABYTE
        self._given_up = given_up
        self._clock = clock
        self._began = clock()
        self._sent = 0

    @property
    def piece_bytes(self) -> int | None:
        """How much to send at a time; None: all of it."""
        if self._rate is None:
            return None
        return min(_MOST_PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(self._rate * _PIECE_SECONDS)))

    def sent(self, count: int) -> None:
        """So many bytes were sent: wait until more may be. Raises ExpelledError when nothing is to be sent any more."""
        if self._rate is None:
            return
        self._sent += count
        ahead = self._began + self._sent / self._rate - self._clock()
        if self._given_up.wait(max(0.0, ahead)):
            raise ExpelledError("the round was given up")


def begun(work: Callable[[], None]) -> Future[None]:
    """``work``, begun in a thread that keeps no process from ending; the result raises what it raises."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="bamboo-memory-copies", daemon=True).start()
    return future


def send_part(links: Connected, worker: WorkerId, key: str, sealed: SealedPart, *, pace: Pace) -> None:
    """Send it. Its tensors must stay as they are until it is there. Raises ExpelledError as :class:`Pace` does."""
    tensors, size = sealed.part.tensors, pace.piece_bytes
    if size is None:
        links.send(worker, Message(key, (sealed.to_plain(), None), tensors))
        return
    forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    links.send(worker, Message(key, (sealed.to_plain(), forms)))
    for number, piece in enumerate(_pieces(tensors, size)):
        links.send(worker, Message(f"{key}/{number}", None, [piece]))
        pace.sent(piece.numel())


def receive_part(links: Connected, worker: WorkerId, key: str) -> SealedPart:
    """Inverse of :func:`send_part`, however it was sent. Raises MessageError for pieces that are none of it."""
    message = links.receive(worker, key)
    plain, forms = message.data
    if forms is None:
        return SealedPart.from_plain(plain, [tensor.to("cpu") for tensor in message.tensors])
    tensors, number = [], 0
    for dtype, shape in forms:
        flat = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        filled = 0
        while filled < flat.numel():
            piece = links.receive(worker, f"{key}/{number}").tensors[0]
            if not 0 < piece.numel() <= flat.numel() - filled:
                raise MessageError(f"piece {number} of {key} has {piece.numel()} bytes, which are not in that copy")
            flat[filled : filled + piece.numel()] = piece
            filled, number = filled + piece.numel(), number + 1
        tensors.append(flat.view(dtype).reshape(tuple(shape)))
    return SealedPart.from_plain(plain, tensors)


def _pieces(tensors: Sequence[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            yield from (flat[start : start + size] for start in range(0, flat.numel(), size))
