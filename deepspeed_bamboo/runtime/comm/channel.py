"""A FIFO of messages between two workers on a process group of their own, with waits that can be interrupted.

Gloo's receive cannot be aborted from another thread while the peer lives, so a helper thread sits in it
and the main thread waits on a condition. On a change of epoch the main thread leaves at once; the helper
is released by the peer's death, or by the peer's farewell message, and its late result is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deepspeed_bamboo.errors import MessageError, ModelError
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.header import HEADER_LIMIT_BYTES, Description, Header
from deepspeed_bamboo.runtime.comm.nccl import Arrival, DeviceLanes

_Form = tuple[Any, Description]  # plain data, and dtype and shape of every tensor

# Every message starts with one block: two lengths, then the header if it fits.
_BLOCK_BYTES = 4096
_LENGTHS = struct.Struct("=qq")
_LENGTHS_BYTES = _LENGTHS.size
_PIECE_BYTES = 32 * 2**20  # of a payload that is sent: an operation has a time limit, and a long transfer has many
_LANE_SECONDS = 30.0  # between the first and the second side's knowing of a lane
_FAREWELL = "the peer has dropped the channel"
_BLOCK_TAG, _HEADER_TAG, _PAYLOAD_TAG = 1, 2, 3


@dataclass
class Message:
    """One message: a key that says what it is, plain data, and tensors."""

    key: str
    data: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    arrival: Arrival | None = None  # while its tensors are still on their way over a lane
    by_lane: bool = False  # received over a lane: the tensors are nobody else's
    kind: str | None = None  # what it has in common with other messages of the same form, see Channel.announce


class Meter(Protocol):
    """Counts what arrives."""

    def expect(self, total: int) -> None:
        """So many bytes will come."""

    def add(self, done: int) -> None:
        """So many more have come."""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Channel:
    """Both directions between this worker and ``peer``; messages of each direction stay in order.

    Keys, plain data and host tensors travel over gloo; device tensors over ``lanes`` where there are any,
    and by way of the host where there are none.

    Args:
        group: a gloo group with the peer alone, see :mod:`proved_group`.
        first: True on the side with rank 0 of the pair.
        peer: the other worker's id, for errors.
        interruption: ends waits; also notified when a message arrives.
    """

    def __init__(self, group: Any, *, first: bool, peer: str, interruption: Interruption) -> None:
        self.peer = peer
        self._lanes: DeviceLanes | None = None
        self._has_lanes = threading.Event()  # or is closed
        self._interruption = interruption
        self._other = 1 if first else 0
        self._group = group
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._sent_before: list[tuple[Any, torch.Tensor]] = []
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._arrived: list[Message] = []
        self._forms: dict[str, _Form] = {}
        self._announced: dict[str, _Form] = {}
        self._error: str | None = None
        self._meter: Meter | None = None
        self._outstanding = 0
        self._closed = False
        self._reader = threading.Thread(target=self._read, name=f"bamboo-from-{peer}", daemon=True)
        self._reader.start()

    @property
    def lanes(self) -> DeviceLanes | None:
        """For device tensors; None until there are any."""
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: DeviceLanes | None) -> None:
        self._lanes = lanes
        if lanes is not None:
            self._has_lanes.set()

    def send(self, message: Message) -> None:
        """Queue ``message``; never blocks on the peer. About its tensors see :meth:`drain`."""
        description = [(tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors]
        if message.key in self._announced:
            self._keep_promise(message, description)
            return
        lanes = self.lanes if go_by_lane(message.tensors) else None
        parts = [] if lanes is not None else [_as_bytes(tensor.to("cpu")) for tensor in message.tensors]
        size = sum(part.numel() for part in parts)
        header = Header(message.key, message.data, description, on_lane=lanes is not None).to_bytes()
        self._send_header(header, payload_bytes=size)
        if size:
            for piece in _pieces(parts[0] if len(parts) == 1 else torch.cat(parts)):
                self._post(piece, _PAYLOAD_TAG)
        if lanes is not None:
            lanes.send([tensor.detach() for tensor in message.tensors])
            if message.kind is not None:
                self._forms[message.kind] = (message.data, description)

    def announce(self, key: str, *, kind: str) -> None:
        """Send the header of message ``key`` before its tensors exist, so that the peer is receiving when they do.

        Only where a message of this ``kind`` has been sent over a lane before, whose form is promised again:
        without ``dynamic_shape`` shapes are the same in every micro-batch. Otherwise nothing happens.
        """
        form = self._forms.get(kind)
        if form is None or self.lanes is None:
            return
        self._announced[key] = form
        self._send_header(Header(key, *form, on_lane=True).to_bytes(), payload_bytes=0)

    def _keep_promise(self, message: Message, description: Description) -> None:
        """Send the tensors of an announced message. Raises ModelError if they are not as announced."""
        form = self._announced.pop(message.key)
        if form != (message.data, description) or self.lanes is None:
            raise ModelError(
                f"a stage sends {description} where it sent {form[1]} before. Shapes and types between stages must "
                "stay the same, or PipelineModule must be given dynamic_shape=True"
            )
        self.lanes.send([tensor.detach() for tensor in message.tensors])

    def forget_forms(self) -> None:
        """Between iterations: what is sent from now on may have other shapes than before."""
        self._forms.clear()

    def expect(self, count: int) -> None:
        """``count`` messages are sure to come: read them as soon as they are sent, ahead of :meth:`receive`.

        Of device tensors only the header: a lane's receive is posted by :meth:`receive`.
        """
        self._outstanding += count
        for _ in range(count):
            self._wanted.put(True)

    def receive(self, *, unseen: str | None = None, started: str | None = None, meter: Meter | None = None) -> Message:
        """The next message from the peer. Raises PeerLostError, or what interrupts the wait.

        Message ``unseen`` is returned once its header is there. If it still has its ``arrival`` then, its tensors are
        to be confirmed by that. Of message ``started`` the tensors are to be taken from that, too. ``meter`` counts
        the bytes of what is read meanwhile over gloo.
        """
        self._meter = meter
        if self._outstanding == 0:
            self._outstanding += 1
            self._wanted.put(True)
        self._interruption.wait_until(lambda: bool(self._arrived) or self._error is not None)
        if self._arrived:
            self._outstanding -= 1
            message = self._arrived.pop(0)
            if message.arrival is not None and message.key == unseen:
                message.tensors = message.arrival.begin()
            elif message.arrival is not None and message.key == started:
                message.arrival.start()
            elif message.arrival is not None:
                message.tensors = message.arrival.wait(self._interruption)
                message.arrival = None
            return message
        raise PeerLostError(self.peer, self._error or "closed", farewell=self._error == _FAREWELL)

    def drain(self) -> None:
        """Let go of what was sent before the previous call; called after an agreement, in which everybody took part.

        A send ends when the receiver asks for it, perhaps never. What came before the last but one agreement was
        asked for by all who are alive, so this never waits for a peer. Tensors must stay unchanged up to the
        agreement after which they are certain to be received.
        """
        for work, _tensor in self._sent_before:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._sent_before, self._sending = self._sending, []

    def flush(self, *, within_seconds: float) -> None:
        """Wait until everything sent is received, for no longer than that: before this process ends."""

        def wait() -> None:
            for work, _tensor in (*self._sent_before, *self._sending):
                with contextlib.suppress(RuntimeError):
                    work.wait()

        waiting = threading.Thread(target=wait, name=f"bamboo-flush-{self.peer}", daemon=True)
        waiting.start()
        waiting.join(within_seconds)

    def close(self) -> None:
        """Drop the channel: release the peer's helper thread if it sits in a receive, then let go. Never blocks."""
        if self._closed:
            return
        self._closed = True
        self._wanted.put(False)
        self._has_lanes.set()
        if self.lanes is not None:
            self.lanes.abort()
        farewell = torch.zeros(1, dtype=torch.uint8)
        for tag in (_BLOCK_TAG, _HEADER_TAG, _PAYLOAD_TAG):
            try:
                self._sending.append((self._group.send([farewell], self._other, tag), farewell))
            except RuntimeError:
                break  # the peer is gone already, which releases everything too

    def _send_header(self, header: bytes, *, payload_bytes: int) -> None:
        block = bytearray(_BLOCK_BYTES)
        _LENGTHS.pack_into(block, 0, len(header), payload_bytes)
        inline = len(header) <= _BLOCK_BYTES - _LENGTHS_BYTES
        if inline:
            block[_LENGTHS_BYTES : _LENGTHS_BYTES + len(header)] = header
        self._post(torch.frombuffer(block, dtype=torch.uint8), _BLOCK_TAG)
        if not inline:
            self._post(torch.frombuffer(bytearray(header), dtype=torch.uint8), _HEADER_TAG)

    def _post(self, tensor: torch.Tensor, tag: int) -> None:
        try:
            self._sending.append((self._group.send([tensor], self._other, tag), tensor))
        except RuntimeError as error:
            raise PeerLostError(self.peer, cause_of(error)) from error

    def _read(self) -> None:
        while self._wanted.get() and not self._closed:
            try:
                message = self._read_one()
            except (RuntimeError, ValueError, MemoryError) as error:
                self._error = cause_of(error)
                self._interruption.notify()
                return
            self._arrived.append(message)
            self._interruption.notify()

    def _read_one(self) -> Message:
        block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
        self._take(block, _BLOCK_TAG)
        header_bytes, size = _LENGTHS.unpack(block[:_LENGTHS_BYTES].numpy().tobytes())
        if header_bytes == 0:
            raise RuntimeError(_FAREWELL)
        if not 0 < header_bytes <= HEADER_LIMIT_BYTES:
            raise MessageError(f"a message that announces a header of {header_bytes} bytes")
        header = block[_LENGTHS_BYTES : _LENGTHS_BYTES + header_bytes]
        if header_bytes > _BLOCK_BYTES - _LENGTHS_BYTES:
            header = torch.empty(header_bytes, dtype=torch.uint8)
            self._take(header, _HEADER_TAG)
        found = Header.from_bytes(header.numpy().tobytes(), payload_bytes=size)
        if found.on_lane:
            # The peer may have been the first to see the lane that both have made.
            self._has_lanes.wait(_LANE_SECONDS)
            if self.lanes is None:
                raise RuntimeError("it sends device tensors, but there is no lane to receive them")
            return Message(found.key, found.data, arrival=self.lanes.receive(found.description), by_lane=True)
        tensors: list[torch.Tensor] = []
        if found.description:
            payload = torch.empty(size, dtype=torch.uint8)
            meter = self._meter
            if meter is not None:
                meter.expect(size)
            for piece in _pieces(payload):
                self._take(piece, _PAYLOAD_TAG)
                if meter is not None:
                    meter.add(piece.numel())
            tensors = _split(payload, found.description)
        return Message(found.key, found.data, tensors)

    def _take(self, tensor: torch.Tensor, tag: int) -> None:
        self._group.recv([tensor], self._other, tag).wait()


def go_by_lane(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a lane can send them: where some are on the host, all go by way of it."""
    return bool(tensors) and all(tensor.device.type != "cpu" for tensor in tensors)


def _pieces(payload: torch.Tensor) -> Iterator[torch.Tensor]:
    """``payload``, which is one row of bytes, in pieces of a limited size; both sides cut it alike."""
    for start in range(0, payload.numel(), _PIECE_BYTES):
        yield payload[start : start + _PIECE_BYTES]


def _split(payload: torch.Tensor, description: Description) -> list[torch.Tensor]:
    tensors = []
    offset = 0
    for dtype, shape in description:
        count = 1
        for extent in shape:
            count *= extent
        size = count * dtype.itemsize
        piece = payload[offset : offset + size]
        # A view of another dtype needs an aligned start; a copy has one.
        if offset % max(dtype.itemsize, 1):
            piece = piece.clone()
        tensors.append(piece.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
        offset += size
    return tensors
