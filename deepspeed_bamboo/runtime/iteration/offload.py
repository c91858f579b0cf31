"""Where a redundant forward keeps what its backward would need: on the device, or in pinned host memory.

It is almost never needed, so it should not take device memory (Bamboo, section 5.2). Parameters are not copied: they
are on the device anyway, and do not change inside an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_bamboo.errors import MemoryLimitError
from deepspeed_bamboo.runtime.comm.layout import strides_of
from deepspeed_bamboo.runtime.iteration.pinned import PinnedMemory

# Smaller tensors cost more to move than they free.
_SMALLEST_BYTES = 4096
# Copies are launched for so much at once: each launch costs time, and what waits for it stays on the device.
_LAUNCHED_BYTES = 128 * 2**20
# Host memory is page-locked in blocks of so much, since that takes long.
_BLOCK_BYTES = 256 * 2**20
# A view of at least this part of its memory is kept by a copy of all of that. Queries, keys and values are three views
# of one tensor, say, and all of them are saved.
_LARGE_PART = 0.25
# Kernels are chosen by strides, and by whether addresses are multiples of up to so much.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saved, which lies in its memory as ``view`` says: size, strides and offset.

    ``copy`` is that of all its memory, with ``whole``, or else of the tensor alone, without gaps.
    """

    copy: Any
    view: tuple[torch.Size, tuple[int, ...], int]
    whole: bool

    def restore(self, copied_back: torch.Tensor) -> torch.Tensor:
        """The tensor, from its copy on the device, with the strides and the alignment that it had."""
        size, strides, offset = self.view
        if self.whole:
            return copied_back.as_strided(size, strides, offset)
        line = max(1, _ALIGNMENT_BYTES // copied_back.element_size())
        start = offset % line
        if strides_of(copied_back) == strides and copied_back.storage_offset() % line == start:
            return copied_back
        last = sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
        room = copied_back.new_empty(start + last + 1 if copied_back.numel() else 0)
        once = [1 if stride == 0 else extent for extent, stride in zip(size, strides, strict=True)]
        room.as_strided(once, strides, start).copy_(copied_back[tuple(slice(extent) for extent in once)])
        return room.as_strided(size, strides, start)


class SharedCopies:
    """One copy, made by ``copy``, of what is saved several times: as itself, transposed, reshaped or in large parts.

    Lives as long as one forward. What is changed in place between two saves is copied again.
    """

    def __init__(self, copy: Callable[[torch.Tensor], Any]) -> None:
        self._copy = copy
        # The weak references keep addresses from being given to other memory, as long as they are known here.
        self._made: dict[Any, tuple[StorageWeakRef, Any]] = {}

    def of(self, tensor: torch.Tensor) -> SavedTensor:
        """The copy of ``tensor``, made now unless there is one."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        layout = (tensor.size(), strides_of(tensor), int(tensor.storage_offset()))
        count, rest = divmod(storage.nbytes(), tensor.element_size())
        whole = not rest and tensor.numel() >= _LARGE_PART * count
        key = (reference.cdata, tensor.dtype, tensor._version, None if whole else layout)
        if key not in self._made:
            source = tensor.as_strided((count,), (1,), 0) if whole else tensor
            self._made[key] = (reference, self._copy(source.detach()))
        return SavedTensor(self._made[key][1], layout, whole)


@dataclass(slots=True, eq=False)
class HostCopy:
    """What is on its way to the host: still on the device (``source``), or in ``host`` once ``copied`` has happened."""

    source: torch.Tensor | None
    host: torch.Tensor | None = None
    copied: Any = None


class HostOffload:
    """Moves what autograd saves in a block to pinned host memory, on a copy stream of its own.

    Copies are launched several at once, a moment after the saves: in between nothing may be changed in place, as
    autograd itself demands of what it saves.

    Args:
        device: the worker's device; on a CPU there is nothing to move.
        limit_bytes: most that may be kept at once; None for no limit.
    """

    def __init__(self, *, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None
        self._memory = PinnedMemory(block_bytes=min(_BLOCK_BYTES, limit_bytes or _BLOCK_BYTES))
        self._waiting: list[HostCopy] = []
        self._waiting_bytes = 0
        self.kept_bytes = 0
        self.peak_bytes = 0

    @property
    def copies(self) -> bool:
        """True where anything is copied: on a CPU everything is in host memory already."""
        return self._stream is not None

    @property
    def busy(self) -> bool:
        """True while a copy to the host is on its way."""
        return self._copied is not None and not self._copied.query()

    @contextmanager
    def offloading(self, module: torch.nn.Module) -> Iterator[None]:
        """What autograd saves inside the block, except ``module``'s parameters, goes to the host.

        Raises MemoryLimitError when that would exceed the limit.
        """
        if self._stream is None:
            yield
            return
        resident = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        copies = SharedCopies(self._keep)

        def pack(tensor: torch.Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            if not tensor.is_cuda or size < _SMALLEST_BYTES or tensor.untyped_storage().data_ptr() in resident:
                return tensor
            return copies.of(tensor)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._to_device):
                yield
            self._copy_waiting()
        finally:
            for kept in self._waiting:
                kept.source = None
            self._waiting, self._waiting_bytes = [], 0

    def start_iteration(self) -> None:
        """What the previous iteration kept has been dropped."""
        self.kept_bytes = 0
        self._memory.take_back()

    def _keep(self, tensor: torch.Tensor) -> HostCopy:
        size = tensor.numel() * tensor.element_size()
        self.kept_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
        if self._limit_bytes is not None and self.kept_bytes > self._limit_bytes:
            raise MemoryLimitError(
                f"redundant forwards keep {self.kept_bytes / 2**30:.2f} GiB on the host, over "
                f"bamboo.redundancy.memory_limit_gigabytes = {self._limit_bytes / 2**30:.2f}; raise the limit, use "
                'fewer or smaller micro-batches, or set bamboo.redundancy.mode to "lazy"'
            )
        kept = HostCopy(tensor)
        self._waiting.append(kept)
        self._waiting_bytes += size
        if self._waiting_bytes >= _LAUNCHED_BYTES:
            self._copy_waiting()
        return kept

    def _copy_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        stream = self._stream
        if stream is None or not waiting:
            return
        tensors = [kept.source for kept in waiting if kept.source is not None]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # A copy of what has gaps would go by way of other host memory, and the caller would wait for it.
            sources = [t if t.is_contiguous() else torch.empty_like(t).copy_(t) for t in tensors]
            hosts = [self._memory.like(source) for source in sources]
            torch._foreach_copy_(hosts, sources, non_blocking=True)
            copied = self._copied = stream.record_event()
        for kept, tensor, host in zip(waiting, tensors, hosts, strict=True):
            # The allocator must not hand the memory out again before the copy has read it.
            tensor.record_stream(stream)
            kept.source, kept.host, kept.copied = None, host, copied

    def _to_device(self, packed: torch.Tensor | SavedTensor) -> torch.Tensor:
        if not isinstance(packed, SavedTensor):
            return packed
        kept: HostCopy = packed.copy
        if kept.source is not None:
            return packed.restore(kept.source)
        if kept.host is None:
            raise RuntimeError("what autograd saved was given up, because its forward failed")
        torch.cuda.current_stream(self._device).wait_event(kept.copied)
        return packed.restore(kept.host.to(self._device, non_blocking=True))
