"""Buffers of a stage by name: a forward may register one, or another size of it (a cache for longer sequences)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

BufferName = tuple[str, bool]
"""Path of a buffer in its stage, and whether it is in the state_dict."""
Marks = Mapping[BufferName, tuple[torch.Tensor, int]]
"""Which tensor each buffer is, and how often it has been changed."""


def named_buffers(module: torch.nn.Module) -> dict[BufferName, torch.Tensor]:
    """All of a stage, each once, in the order of ``buffers()``."""
    return {(name, _kept(module, name)): buffer for name, buffer in module.named_buffers()}


def marks_of(module: torch.nn.Module) -> Marks:
    """As they are now, for :func:`moved_since`."""
    return {name: (buffer, _version(buffer)) for name, buffer in named_buffers(module).items()}


def moved_since(module: torch.nn.Module, marks: Marks) -> dict[BufferName, torch.Tensor]:
    """The buffers that have been changed, made or replaced since."""
    found = {}
    for name, buffer in named_buffers(module).items():
        before, version = marks.get(name, (None, 0))
        if before is not buffer or _version(buffer) != version:
            found[name] = buffer
    return found


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


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
