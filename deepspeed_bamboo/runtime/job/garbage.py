"""Keeps Python's garbage collector from stopping a worker, and with it the whole pipeline, in mid-iteration."""

from __future__ import annotations

import gc

import torch


def set_aside_what_exists(device: torch.device) -> None:
    """Leave all objects there are out of future collections: hundreds of thousands of torch's and DeepSpeed's.

    Looking through them takes tens of milliseconds, on one worker or another in nearly every iteration. On a CPU,
    where that is little, nothing is done.
    """
    if device.type == "cpu":
        return
    gc.collect()
    gc.freeze()


def set_aside_imports() -> None:
    """The same for what is imported before a script runs, on any device: DeepSpeed collects garbage at its start.

    With bf16 or ZeRO eight times for each engine, which took two seconds of a core.
    """
    gc.freeze()


def take_back() -> None:
    """Undo both: garbage among them can be collected again."""
    gc.unfreeze()
