"""How a tensor's numbers lie in memory. Kernels, and with them last bits, depend on it; some optimizers rely on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Layout = tuple[int, ...] | None
"""The strides of a tensor that fills its memory without gaps, other than the usual ones of its shape.

None for the usual ones, and for a tensor with gaps or overlaps, of which a copy has the usual ones.
"""


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of ``tensor``."""
    strides = strides_of(tensor)
    return strides if strides != _usual(tensor.shape) and is_layout(tensor.shape, strides) else None


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Torch's own answer: Megatron's and gpt-neox's layers give their parameters a number of the name ``stride``."""
    return torch.Tensor.stride(tensor)


def is_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this ``shape`` and these ``strides`` fills its memory without gaps and overlaps."""
    if len(shape) != len(strides) or min(strides, default=0) < 0 or not math.prod(shape):
        return False
    step = 1
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride != step:
            return False
        step *= extent
    return True


def empty_in_layout(shape: Sequence[int], layout: Layout, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape and layout, not initialized."""
    strides = _usual(shape) if layout is None else layout
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)


def in_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``tensor`` itself if it has this layout, or else a copy that has."""
    if layout_of(tensor) == layout:
        return tensor
    return empty_in_layout(tensor.shape, layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _usual(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
