"""Initial weights that are a function of a seed and a layer's position, not of the number of stages or of who builds.

torch's own generator is where it was afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside the block, torch's CPU generator draws what follows from ``seed``; afterwards it is where it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def layer_seed(seed: int, position: int) -> int:
    """The seed of the layer at ``position``. A layer may also use the numbers just behind it: seeds lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(2**40, (position + 1,), generator=generator)[position].item())
