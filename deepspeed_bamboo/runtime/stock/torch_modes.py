"""In which of torch's modes code runs: a script's blocks are around what a loss brings, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Of one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cached: bool


@dataclass(frozen=True)
class TorchModes:
    """What a script has chosen by ``torch.autocast`` where an iteration began."""

    autocasts: tuple[Autocast, ...]

    @classmethod
    def now(cls, device: torch.device) -> TorchModes:
        """Those of this moment, for ``device`` and the host."""
        cached = torch.is_autocast_cache_enabled()
        kinds = sorted({device.type, "cpu"})
        return cls(tuple(Autocast(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), cached) for k in kinds))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as they were, whatever they are now."""
        with ExitStack() as blocks:
            for its in self.autocasts:
                blocks.enter_context(torch.autocast(its.device_type, its.dtype, its.enabled, its.cached))
            yield


@contextmanager
def training_modes() -> Iterator[None]:
    """Inside, backwards are possible and tensors are ordinary ones, also within a script's ``no_grad``."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield
