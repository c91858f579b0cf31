"""The transformers by name. The tiny ones read bytes, the real ones have the vocabulary of the published models."""

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
    vocabulary: int
    causal: bool = True  # GPT-2; else BERT
    tied: bool = False  # the head uses the embedding's weights; BERT's always does
    dropout: float = 0.0  # as published
    fused_attention: bool = False  # torch's fused kernel; False: plain matrix products, the same bits everywhere

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} can't be split into {self.heads} heads; make it a multiple")


def _by_name(sizes: Iterable[ModelSize]) -> dict[str, ModelSize]:
    return {size.name: size for size in sizes}


def _gpt2(name: str, *, layers: int, width: int, heads: int) -> ModelSize:
    return ModelSize(
        name,
        layers=layers,
        width=width,
        heads=heads,
        sequence_length=1024,
        vocabulary=50257,
        fused_attention=True,
        tied=True,
        dropout=0.1,
    )


MODEL_SIZES = _by_name(
    [
        ModelSize("gpt2-tiny", layers=4, width=64, heads=4, sequence_length=64, vocabulary=256),
        _gpt2("gpt2-small", layers=12, width=768, heads=12),
        _gpt2("gpt2-medium", layers=24, width=1024, heads=16),
        _gpt2("gpt2-large", layers=36, width=1280, heads=20),
        _gpt2("gpt2-xl", layers=48, width=1600, heads=25),
        ModelSize(
            "bert-tiny", layers=3, width=32, heads=4, sequence_length=32, vocabulary=260, causal=False, dropout=0.1
        ),
        ModelSize(
            "bert-large",
            layers=24,
            width=1024,
            heads=16,
            sequence_length=512,
            vocabulary=30522,
            causal=False,
            fused_attention=True,
            dropout=0.1,
        ),
    ]
)
