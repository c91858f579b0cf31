"""Random numbers of a forward: a function of seed, step, pipeline, stage and micro-batch, and of nothing else.

So a redundant forward, a recomputation and activation checkpointing draw what the first forward drew,
and the user's own generators are where the user left them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


class ModelGenerators:
    """Lends the global generators to the model's passes, and gives them back to the user in between.

    Putting the user's generators aside costs about half a millisecond (numpy's most of all), which would lie
    between the arrival of a micro-batch and its first kernel. So it is done when the first pass begins, and
    undone only where code of the user's runs outside of the model; a pass just seeds.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: ExitStack | None = None

    def seed(self, seed: int) -> None:
        """Before a forward or backward: the generators belong to the model, and start from ``seed``."""
        if self._lent is None:
            self._lent = ExitStack()
            self._lent.enter_context(generators_untouched(self._device))
        # torch.manual_seed also notes a stack trace for every kind of device that it never initialised.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    def give_back(self) -> None:
        """The generators are the user's again, as they were when the model got them."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()
