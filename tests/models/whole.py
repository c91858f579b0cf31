"""A list of LayerSpecs as one module, without a pipeline; and a little data for any model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from torch import nn

from deepspeed_bamboo.models.catalog import DataPaths


class Whole(nn.Module):
    """All layers in one process, as a pipeline of one stage has them."""

    def __init__(self, specs: Sequence[Any]) -> None:
        super().__init__()
        tied: dict[str, nn.Module] = {}
        self.layers = nn.ModuleList()
        self._forwards = []
        for spec in specs:
            layer = spec.build()
            if isinstance(spec, TiedLayerSpec):
                layer = tied.setdefault(spec.key, layer)
            self.layers.append(layer)
            self._forwards.append(getattr(spec, "forward_fn", None))

    def forward(self, x: Any) -> Any:
        for layer, forward in zip(self.layers, self._forwards, strict=True):
            x = layer(x) if forward is None else forward(layer, x)
        return x


def little_data(name: str) -> DataPaths:
    """For the model called ``name``: this file as text, or what is made up. Python's own sources take long to read."""
    return DataPaths(Path(__file__)) if name.startswith(("gpt2", "bert")) else DataPaths()
