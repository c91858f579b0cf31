"""Page-locked host memory, given out piece by piece and taken back all at once."""

from __future__ import annotations

import torch

from deepspeed_bamboo.runtime.comm.layout import strides_of

# Where pieces begin: a transfer is fastest from whole lines.
_ALIGNMENT_BYTES = 256


class PinnedMemory:
    """Blocks of host memory for what one iteration keeps there; the next iteration gets the same ones.

    Asking the system or an allocator for each tensor would take longer than launching its copy.

    Args:
        block_bytes: the least to ask the system for at once.
        pinned: whether to page-lock it, which needs CUDA.
    """

    def __init__(self, *, block_bytes: int, pinned: bool = True) -> None:
        self._block_bytes = block_bytes
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []
        self._current = 0
        self._used = 0

    @property
    def reserved_bytes(self) -> int:
        """What has been asked for so far."""
        return sum(len(block) for block in self._blocks)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for ``tensor``, which has no gaps: on the host, with its type, shape and strides, not initialized.

        Kernels, and so last bits, may depend on strides.
        """
        size = tensor.numel() * tensor.element_size()
        room = self._take(size)
        return room.view(tensor.dtype).as_strided(
            tensor.size(), strides_of(tensor), room.storage_offset() // tensor.element_size()
        )

    def take_back(self) -> None:
        """Nobody uses any of it any more."""
        self._current, self._used = 0, 0

    def _take(self, size: int) -> torch.Tensor:
        while self._current < len(self._blocks) and self._used + size > len(self._blocks[self._current]):
            self._current, self._used = self._current + 1, 0
        if self._current == len(self._blocks):
            block = torch.empty(max(size, self._block_bytes), dtype=torch.uint8, pin_memory=self._pinned)
            self._blocks.append(block)
        start, self._used = self._used, -(-(self._used + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._blocks[self._current][start : start + size]
