"""Buffers of a stage by name: a forward may register one, or another size of it (a cache for longer sequences)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

BufferName = tuple[str, bool]
"""Path of a buffer in its stage, and whether it is in the state_dict."""


def named_buffers(module: torch.nn.Module) -> dict[BufferName, torch.Tensor]:
    """All of a stage, each once, in the order of ``buffers()``."""
    return {(name, _kept(module, name)): buffer for name, buffer in module.named_buffers()}


def accept_buffers(module: torch.nn.Module, values: Mapping[BufferName, torch.Tensor]) -> None:
    """Make those of another replica of the stage equal; what it lacks, or has in another size, is made."""
    held = dict(module.named_buffers())
    with torch.no_grad():
        for (name, kept), value in values.items():
            target = held.get(name)
            if target is not None and target.shape == value.shape:
                target.copy_(value)
                continue
            path, _, last = name.rpartition(".")
            holder = module.get_submodule(path)
            holder.__dict__.pop(last, None)
            holder.register_buffer(last, value.clone(), persistent=kept)


def _kept(module: torch.nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in module.get_submodule(path)._non_persistent_buffers_set
