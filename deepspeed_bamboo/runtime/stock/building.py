"""What is around the building of another stage, in the middle of what a script does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_bamboo.runtime.stock.randomness import generators_untouched
from deepspeed_bamboo.runtime.stock.torch_modes import training_modes


@contextmanager
def built_apart(device: torch.device) -> Iterator[None]:
    """Build layers whatever the script is doing, and leave its generators where they are."""
    with training_modes(), generators_untouched(device), _more_threads(device):
        yield


@contextmanager
def _more_threads(device: torch.device) -> Iterator[None]:
    """Build layers, which happens on the host, with this device's share of its cores.

    Only beside a GPU: there no result depends on the number of host threads.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())))
    try:
        yield
    finally:
        torch.set_num_threads(before)
