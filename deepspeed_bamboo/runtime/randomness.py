"""Random numbers of a forward: a function of seed, step, pipeline, stage and micro-batch, and of nothing else.

So a redundant forward, a recomputation and activation checkpointing draw what the first forward drew,
and the user's own generators are where the user left them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_bamboo.core.grid import Coordinate


def forward_seed(seed: int, *, step: int, coordinate: Coordinate, micro_batch: int, training: bool) -> int:
    """A 63-bit seed from what identifies one forward."""
    text = f"{seed}/{step}/{coordinate}/{micro_batch}/{'train' if training else 'eval'}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """Restore torch's, Python's and numpy's global generators at the end."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with all global generators seeded from ``seed``; afterwards they are as before."""
    with generators_untouched(device):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
