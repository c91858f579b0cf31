"""Calls into stock code that stop at their collectives, so that one thread can serve several coordinates.

DeepSpeed's reductions and optimizers call blocking collectives deep inside their own code. A worker that
hosts two coordinates of one group would wait for itself there. So such a call runs on a helper thread, one
at a time: it runs until its next collective, gives its contribution, and continues when the answer is
known. Exactly one of the two threads runs at any moment, which keeps everything deterministic.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.logical import GroupKey


@dataclass(frozen=True)
class Request:
    """What a suspended call waits for.

    ``group`` is None for the gate before an optimizer's update: nothing to exchange, but nothing may change
    before all workers agreed (architecture 5). ``sequence`` counts this call's requests in the group from 0:
    a stage may have others in between, in groups that are not everybody's.
    """

    group: GroupKey | None
    operation: str
    tensor: torch.Tensor | None
    sequence: int

    @property
    def members(self) -> tuple[Coordinate, ...]:
        """The coordinates that take part. Raises RuntimeError for a gate."""
        if self.group is None:
            raise RuntimeError("a gate has no members")
        return self.group.members

    @property
    def value(self) -> torch.Tensor:
        """What is handed in, without its history. Raises RuntimeError for a gate."""
        if self.tensor is None:
            raise RuntimeError(f"{self.operation} without a tensor")
        return self.tensor.detach()


class CallCancelledError(BaseException):
    """Unwinds a suspended call that will not be resumed; derives from BaseException so that no handler keeps it."""


class SuspendedCall:
    """One call of stock code, resumable at each of its collectives."""

    def __init__(self, function: Callable[[], Any], *, device: torch.device) -> None:
        self._function = function
        self._device = device
        # The script may have another one than the default, which threads have.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._turn = threading.Semaphore(0)
        self._handed_over = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._answer: torch.Tensor | None = None
        self._cancelled = False
        self._error: BaseException | None = None
        self.requests = 0
        self._sequences: Counter[GroupKey | None] = Counter()
        self.pending: Request | None = None
        self.done = False

    @property
    def started(self) -> bool:
        """True once the call has run to its first collective."""
        return self._thread is not None

    def advance(self, answer: torch.Tensor | None = None) -> None:
        """Run to the next collective or to the end; ``answer`` is the result of the pending one.

        Afterwards either :attr:`pending` holds the next request or :attr:`done` is true. Raises what the
        call raised.
        """
        self._answer = answer
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bamboo-suspended-call", daemon=True)
            self._thread.start()
        self.pending = None
        self._turn.release()
        self._handed_over.acquire()
        if self.done:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Unwind the call where it stands. Returns when its thread has ended."""
        if self._thread is None or self.done:
            self.done = True
            return
        self._cancelled = True
        self._turn.release()
        self._thread.join()

    def exchange(self, group: GroupKey | None, operation: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Called on the helper thread by a collective: hand the request over and wait for the answer."""
        self.pending = Request(group, operation, tensor, self._sequences[group])
        self.requests += 1
        self._sequences[group] += 1
        self._handed_over.release()
        self._turn.acquire()
        if self._cancelled:
            raise CallCancelledError
        return self._answer

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if not self._cancelled:
                with torch.cuda.stream(self._stream):
                    self._function()
        except CallCancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - carried to the thread that asked for the call
            self._error = error
        finally:
            self.done = True
            self._handed_over.release()
