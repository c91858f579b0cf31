"""Small models whose first weights depend on a layer's name alone, and their micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

WIDTH = 8
VOCABULARY = 16


def generator(*name: object) -> torch.Generator:
    """A generator whose numbers depend on ``name`` alone."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Layer(nn.Module):
    """tanh(Linear), with dropout."""

    def __init__(self, name: str, *, dropout: float = 0.0) -> None:
        super().__init__()
        numbers = generator("layer", name)
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_((torch.rand(parameter.shape, generator=numbers) - 0.5) / WIDTH**0.5 * 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x.to(self.linear.weight.dtype))))


class NormLayer(Layer):
    """With buffers: batch statistics, and a count of its forwards in training."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.norm(super().forward(x))


class Table(nn.Module):
    """An embedding that can be tied to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(VOCABULARY, WIDTH, generator=generator("table")) - 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


def as_head(table: Table, x: Tensor) -> Tensor:
    return x @ table.weight.t()


class Pick(nn.Module):
    """[B, S, W] -> [B, W]: what comes before layers that want vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs.float() - labels.float()) ** 2).mean()


def token_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def plain(count: int, *, dropout: float = 0.0) -> list[Any]:
    """``count`` layers, [B, W] -> [B, W]."""
    return [LayerSpec(Layer, str(index), dropout=dropout) for index in range(count)]


def normalised(count: int) -> list[Any]:
    """Layers with buffers."""
    return [LayerSpec(NormLayer, str(index)) for index in range(count)]


def tied(count: int, *, dropout: float = 0.0) -> list[Any]:
    """Tokens in, scores out, with the embedding's weights used by the head too."""
    return [
        TiedLayerSpec("table", Table),
        *plain(count, dropout=dropout),
        TiedLayerSpec("table", Table, forward_fn=as_head),
    ]


def vectors(step: int, pipeline: int, micro_batch: int, *, size: int = 2) -> tuple[Tensor, Tensor]:
    """Input and target of one micro-batch, [B, W] each."""
    numbers = generator("vectors", step, pipeline, micro_batch)
    return torch.randn(size, WIDTH, generator=numbers), torch.randn(size, WIDTH, generator=numbers)


def tokens(step: int, pipeline: int, micro_batch: int, *, size: int = 2) -> tuple[Tensor, Tensor]:
    """Input and target of one micro-batch, [B, 4] int64 each."""
    numbers = generator("tokens", step, pipeline, micro_batch)
    draw = torch.randint(VOCABULARY, (2, size, 4), generator=numbers)
    return draw[0], draw[1]


def micro_batches(make: Any, *, pipeline: int, first_step: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator of one pipeline's micro-batches, from ``first_step`` on, ``count`` a step."""
    step = first_step
    while True:
        for micro_batch in range(count):
            yield make(step, pipeline, micro_batch)
        step += 1
