"""Layers that count a micro-batch again when its forward is repeated in the backward."""

from __future__ import annotations

from typing import Any


def counts_twice(module: Any) -> bool:
    """Whether a PipelineModule has running statistics, and checkpoints that repeat the forwards which change them."""
    if not module.activation_checkpoint_interval:
        return False
    return any("running_mean" in dict(part.named_buffers(recurse=False)) for part in module.modules())
