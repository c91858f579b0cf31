"""The models by name. All read bytes; the real sizes keep the vocabulary of the published models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    """The shape of a transformer."""

    name: str
    layers: int
    width: int
    heads: int
    sequence_length: int
    vocabulary: int  # 256 bytes and, behind them, the mask token of models that aren't causal
    causal: bool = True
    fused_attention: bool = False  # torch's fused kernel; False: plain matrix products, the same bits everywhere

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} can't be split into {self.heads} heads; make it a multiple")

    @property
    def parameters(self) -> int:
        """How many parameters it has with an untied head."""
        block = 12 * self.width**2 + 13 * self.width
        tables = (2 * self.vocabulary + self.sequence_length) * self.width
        return self.layers * block + tables + 2 * self.width


def _by_name(sizes: Iterable[ModelSize]) -> dict[str, ModelSize]:
    return {size.name: size for size in sizes}


MODEL_SIZES = _by_name(
    [
        ModelSize("gpt2-tiny", layers=4, width=64, heads=4, sequence_length=64, vocabulary=256),
        ModelSize(
            "gpt2-small",
            layers=12,
            width=768,
            heads=12,
            sequence_length=1024,
            vocabulary=50304,
            fused_attention=True,
        ),
        ModelSize(
            "gpt2-medium",
            layers=24,
            width=1024,
            heads=16,
            sequence_length=1024,
            vocabulary=50304,
            fused_attention=True,
        ),
        ModelSize(
            "bert-large",
            layers=24,
            width=1024,
            heads=16,
            sequence_length=512,
            vocabulary=30528,
            causal=False,
            fused_attention=True,
        ),
    ]
)
