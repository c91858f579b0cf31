"""Device-to-device transfers between two workers: one NCCL communicator per direction.

One per direction because operations on one communicator run in order: a send that waits for its receiver
must not hold up a receive. The host polls, and uses a tensor only after it has seen it arrive whole (architecture 5,
valid data only); ``iteration/speculative_launch.py`` is the one place that lets the compute stream wait for a tensor
ahead of that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.header import Description
from deepspeed_bamboo.runtime.comm.lane_aborts import LaneAborts

# The first polls spin: data that is early is there at once, and late data is the next micro-batch's, on which the
# device waits. Later polls leave the processor to others.
_SPIN_SECONDS = 0.02
_NAP_SECONDS = 0.00005

_KNOWN = frozenset(
    {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
"""The types that NCCL has names for, of all versions."""


def as_known(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, which is contiguous, as one that NCCL can send: of another type (complex, int16) its bytes."""
    return tensor if tensor.dtype in _KNOWN else tensor.reshape(-1).view(torch.uint8)


class Arrival:
    """Tensors that a peer sends, or will send when it has computed what it has launched."""

    def __init__(self, lanes: DeviceLanes, description: Description) -> None:
        self._lanes = lanes
        self._description = description
        self._tensors: list[torch.Tensor] | None = None
        self._complete: Any = None

    def start(self) -> list[torch.Tensor]:
        """Begin to receive, and wait for nothing; for what will be taken by :meth:`wait`."""
        if self._tensors is None:
            self._tensors, self._complete = self._lanes.start_receiving(self._description)
        return self._tensors

    def wait(self, interruption: Interruption) -> list[torch.Tensor]:
        """The tensors, seen complete by the host. Raises what interrupts the wait.

        The receive begins only here, unless it was started: it takes thread blocks from computing as long as it waits
        for its sender.
        """
        tensors = self.start()
        self.confirm(interruption)
        for tensor in tensors:
            # It belongs to the receiving stream's memory and is used on this one.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensors

    def begin(self) -> list[torch.Tensor]:
        """The tensors, which hold zeros or what the peer sent up to :meth:`confirm`; the compute stream waits for them.

        Zeros, since whatever stands in fresh memory could be a number that ends the process, such as an index that
        is out of range.
        """
        tensors, self._complete = self._lanes.start_receiving(self._description, blank=True)
        for tensor in tensors:
            stream = torch.cuda.current_stream(tensor.device)
            tensor.record_stream(stream)
            if self._complete is not None:
                stream.wait_event(self._complete)
        return tensors

    def confirm(self, interruption: Interruption) -> None:
        """Wait until the host has seen the tensors complete. Raises what interrupts the wait.

        The event is reached only when its kernel has ended, and that ends early only by our own abort.
        """
        start = time.monotonic()
        while self._complete is not None and not self._complete.query():
            interruption.check()
            time.sleep(0 if time.monotonic() - start < _SPIN_SECONDS else _NAP_SECONDS)
        if self._lanes.aborted:
            interruption.check()
            raise RuntimeError("a lane was given up while it was in use, and no interruption was announced")

    @property
    def complete(self) -> Any:
        """The CUDA event, which keeps time, after the last tensor; None before they are being received."""
        return self._complete

    def abort(self) -> None:
        """Give the lane up, from any thread: what waits for these tensors on the device continues without them."""
        self._lanes.abort()


class DeviceLanes:
    """Both directions between this worker's device and a peer's.

    Args:
        store: as for the channel, under a prefix of its own.
        first: True on the side with rank 0.
        device: this worker's device.
        timeout_seconds: bound of NCCL's own watchdog; longer than any recovery.
        aborts: this worker's, which has NCCL give up both.
    """

    # Thread blocks of one transfer: while a receive waits for its sender it takes them from computing.
    most_blocks: int | None = 8
    # A receive ahead of its use begins when what this device has to compute before it is done, or else at once.
    receives_in_order = True

    def __init__(
        self,
        store: Any,
        *,
        first: bool,
        device: torch.device,
        timeout_seconds: float,
        aborts: LaneAborts,
    ) -> None:
        self._device = device
        self._aborts = aborts
        self._peer = 1 if first else 0
        self._in_order = self.receives_in_order
        self.aborted = False
        self._sending: list[tuple[Any, torch.Tensor]] = []
        forth = self._group(store, "forth", first=first, sending=first, timeout_seconds=timeout_seconds)
        back = self._group(store, "back", first=first, sending=not first, timeout_seconds=timeout_seconds)
        self._out, self._in = (forth, back) if first else (back, forth)
        self._in_common_order = (forth, back)
        self._token: torch.Tensor | None = None
        cuda: Any = torch.cuda
        # Of its own, so that a receive does not wait for what this device computes.
        self._receiving = cuda.Stream(device)
        self._event = functools.partial(cuda.Event, enable_timing=True)

    def open(self) -> None:
        """Connect both directions; the peer does the same at the same time. Blocks until it does.

        NCCL makes the connection under a communicator at its first transfer, and the sender's call blocks
        until the receiver makes its own. Two workers that each send first would wait for each other for ever,
        so the first transfer of each direction is made here, in an order common to both sides.
        """
        torch.cuda.set_device(self._device)
        token = self._token = torch.zeros(1, device=self._device)
        for group in self._in_common_order:
            group.eager_connect_single_device(self._device)
            if group is self._out:
                group.send([token], self._peer, 0)
            else:
                group.recv([token], self._peer, 0)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; the tensors are kept alive until they are out, and must not change before."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        for tensor in tensors:
            if tensor.numel():
                ready = as_known(tensor.resolve_conj().resolve_neg().contiguous())
                self._sending.append((self._out.send([ready], self._peer, 0), ready))

    def receive(self, description: Description) -> Arrival:
        """What the peer sends next; wait for one arrival after the other, in their order."""
        return Arrival(self, description)

    def start_receiving(self, description: Description, *, blank: bool = False) -> tuple[list[torch.Tensor], Any]:
        """Post the receives of one message: its tensors, and a CUDA event behind the last (None for nothing at all).

        ``blank``: the tensors are zero before.
        """
        if blank and self._in_order:
            self._receiving.wait_stream(torch.cuda.current_stream(self._device))
        allocate = torch.zeros if blank else torch.empty
        with torch.cuda.stream(self._receiving):
            tensors = [allocate(shape, dtype=dtype, device=self._device) for dtype, shape in description]
            works = [self._in.recv([as_known(tensor)], self._peer, 0) for tensor in tensors if tensor.numel()]
            for work in works:
                work.wait()  # makes the receiving stream wait, not the host
            complete = self._receiving.record_event(self._event()) if works else None
        return tensors, complete

    def abort(self) -> None:
        """Give up both communicators, on threads of their own: aborting can take half a second. Once is enough.

        A thread for each: an abort may wait for a kernel that is behind one of the other communicator, as a send of
        what is computed from a tensor that does not come.
        """
        if self.aborted:
            return
        self.aborted = True
        for group in (self._in, self._out):
            self._aborts.start(functools.partial(self._abort, group))

    def _abort(self, group: Any) -> None:
        torch.cuda.set_device(self._device)
        group.abort()

    @staticmethod
    def _group(store: Any, name: str, *, first: bool, sending: bool, timeout_seconds: float) -> Any:
        options = c10d.ProcessGroupNCCL.Options()
        # A device has few queues (8, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise), which streams share. A receive
        # must never stand behind a send in one: two workers that send to each other would wait for ever. Streams of
        # different priority share none.
        options.is_high_priority_stream = sending
        options._timeout = timedelta(seconds=timeout_seconds)
        if DeviceLanes.most_blocks is not None:
            options.config.max_ctas = DeviceLanes.most_blocks
        return c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), 0 if first else 1, 2, options)
