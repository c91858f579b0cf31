"""GNMT as a LayerSpec list: a translator of stacked LSTMs with attention, and its loss.

Source: Wu et al., arXiv 1609.08144, in the form that MLPerf and PipeDream train: the first layer of the encoder
reads in both directions, layers from the third on are added to their inputs, attention is normalised Bahdanau
attention by the decoder's first layer, whose result all further decoder layers see; encoder and decoder share one
embedding. GNMT-8 has 4 + 4 layers and 160 million parameters, GNMT-16 has 8 + 8.

Shapes: B micro-batch, S source, T target, W width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.dropout import check_dropout, dropout_layer
from deepspeed_bamboo.models.seeding import drawn_from, layer_seed

PADDING = 0
_TIED_KEY = "embedding"
_RANGE = 0.1
_SMOOTHING = 0.1


@dataclass(frozen=True)
class GnmtSize:
    """The shape of a GNMT with as many encoder as decoder layers."""

    name: str
    layers: int  # of the encoder, and as many of the decoder
    width: int
    vocabulary: int
    source_length: int
    target_length: int
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise ValueError(f"layers is {self.layers}; a GNMT has at least 2 in its encoder and its decoder")


GNMT16 = GnmtSize("gnmt16", layers=8, width=1024, vocabulary=32320, source_length=50, target_length=50)
GNMT_TINY = GnmtSize("gnmt-tiny", layers=2, width=16, vocabulary=260, source_length=12, target_length=12)


class Embedding(nn.Module):
    """Tokens to vectors, of which dropout takes some numbers; padding has the vector 0."""

    def __init__(self, vocabulary: int, width: int, *, dropout: float, seed: int) -> None:
        super().__init__()
        with drawn_from(seed):
            self.weight = nn.Parameter(torch.empty(vocabulary, width).uniform_(-_RANGE, _RANGE))  # [V, W]
        with torch.no_grad():
            self.weight[PADDING].zero_()
        self.dropout = dropout_layer(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S, W]."""
        vectors = functional.embedding(tokens, self.weight, padding_idx=PADDING)
        return self.dropout(vectors)  # type: ignore[no-any-return]


class BothWays(nn.Module):
    """The encoder's first layer: forwards and, from each sentence's own end, backwards."""

    def __init__(self, width: int, *, seed: int) -> None:
        super().__init__()
        self.forwards = _lstm(width, width, seed=seed)
        self.backwards = _lstm(width, width, seed=seed + 1)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors [B, S, W], source lengths [B] and target tokens [B, T] -> the same, with vectors [B, S, 2W]."""
        x, lengths, target = inputs
        place = torch.arange(x.shape[1], device=x.device)
        turned = torch.where(place < lengths[:, None], lengths[:, None] - 1 - place, place)  # [B, S], its own inverse
        backwards = _reorder(self.backwards(_reorder(x, turned))[0], turned)
        return torch.cat((self.forwards(x)[0], backwards), dim=2), lengths, target


class EncoderLayer(nn.Module):
    """One more LSTM of the encoder."""

    def __init__(self, inputs: int, width: int, *, residual: bool, dropout: float, seed: int) -> None:
        super().__init__()
        self.dropout = dropout_layer(dropout)
        self.lstm = _lstm(inputs, width, seed=seed)
        self.residual = residual

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors [B, S, inputs], source lengths [B] and target tokens [B, T] -> the same, with vectors [B, S, W]."""
        x, lengths, target = inputs
        y = self.lstm(self.dropout(x))[0]
        return (y + x if self.residual else y), lengths, target


class AttentionLayer(nn.Module):
    """The decoder's first LSTM, and what it looks at in the source."""

    def __init__(self, width: int, *, seed: int) -> None:
        super().__init__()
        self.lstm = _lstm(width, width, seed=seed)
        with drawn_from(seed + 1):
            self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            _uniform(self.query)
            _uniform(self.key)
            self.direction = nn.Parameter(torch.empty(width).uniform_(-_RANGE, _RANGE))
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(1 / width)))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Source vectors [B, S, W], their lengths [B], target vectors [B, T, W] -> decoded and seen, [B, T, W] each."""
        source, lengths, target = inputs
        decoded = self.lstm(target)[0]
        mixed = self.query(decoded)[:, :, None] + self.key(source)[:, None] + self.bias  # [B, T, S, W]
        direction = self.scale * self.direction / self.direction.norm()
        scores = torch.tanh(mixed) @ direction  # [B, T, S]
        missing = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
        weights = scores.float().masked_fill(missing[:, None], -math.inf).softmax(dim=-1).to(source.dtype)
        return decoded, weights @ source


class DecoderLayer(nn.Module):
    """One more LSTM of the decoder; the last one needs to pass on no more than its own result."""

    def __init__(self, width: int, *, residual: bool, last: bool, dropout: float, seed: int) -> None:
        super().__init__()
        self.dropout = dropout_layer(dropout)
        self.lstm = _lstm(2 * width, width, seed=seed)
        self.residual = residual
        self.last = last

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | Tensor:
        """Decoded and seen, [B, T, W] each -> the same, or decoded alone."""
        x, seen = inputs
        y = self.lstm(self.dropout(torch.cat((x, seen), dim=2)))[0]
        y = y + x if self.residual else y
        return y if self.last else (y, seen)


class Scores(nn.Module):
    """Vectors to one score per token."""

    def __init__(self, width: int, vocabulary: int, *, seed: int) -> None:
        super().__init__()
        with drawn_from(seed):
            self.linear = nn.Linear(width, vocabulary)
            _uniform(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, V]."""
        return self.linear(x)  # type: ignore[no-any-return]


def gnmt_layers(size: GnmtSize, *, dropout: float | None = None, seed: int = 0) -> list[Any]:
    """The layers of a GNMT for ``PipelineModule``.

    Input: source tokens [B, S], their numbers without padding [B], target tokens [B, T], int64 each; output: scores
    [B, T, V]. ``dropout``: None for the published 0.2. Raises ValueError for a dropout that is no probability.
    """
    dropout = check_dropout(size.dropout if dropout is None else dropout)
    numbers = iter(layer_seed(seed, position) for position in range(2 * size.layers + 2))
    table, width = next(numbers), size.width
    layers = [_tied(size, embed_source, dropout=dropout, seed=table), LayerSpec(BothWays, width, seed=next(numbers))]
    for index in range(1, size.layers):
        inputs = 2 * width if index == 1 else width
        settings = {"residual": index > 1, "dropout": dropout, "seed": next(numbers)}
        layers.append(LayerSpec(EncoderLayer, inputs, width, **settings))
    layers.append(_tied(size, embed_target, dropout=dropout, seed=table))
    layers.append(LayerSpec(AttentionLayer, width, seed=next(numbers)))
    for index in range(1, size.layers):
        settings = {"residual": index > 1, "last": index == size.layers - 1, "dropout": dropout, "seed": next(numbers)}
        layers.append(LayerSpec(DecoderLayer, width, **settings))
    return [*layers, LayerSpec(Scores, width, size.vocabulary, seed=next(numbers))]


def embed_source(embedding: Embedding, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Source [B, S], lengths [B] and target [B, T], int64 each -> the same, with source vectors [B, S, W]."""
    source, lengths, target = inputs
    return embedding(source), lengths, target


def embed_target(embedding: Embedding, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Source vectors [B, S, W], lengths [B] and target [B, T] -> the same, with target vectors [B, T, W]."""
    source, lengths, target = inputs
    return source, lengths, embedding(target)


def translation_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats without padding, labels smoothed by 0.1: scores [B, T, V], labels [B, T]."""
    flat = scores.float().flatten(0, 1)
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=PADDING, label_smoothing=_SMOOTHING)


def _tied(size: GnmtSize, forward: Any, *, dropout: float, seed: int) -> Any:
    return TiedLayerSpec(
        _TIED_KEY,
        Embedding,
        size.vocabulary,
        size.width,
        dropout=dropout,
        seed=seed,
        forward_fn=forward,
        tied_weight_attr="weight",
    )


def _lstm(inputs: int, width: int, *, seed: int) -> nn.LSTM:
    with drawn_from(seed):
        lstm = nn.LSTM(inputs, width, batch_first=True)
        _uniform(lstm)
    return lstm


def _uniform(module: nn.Module) -> None:
    """Draw all weights of ``module`` from [-0.1, 0.1], as GNMT begins."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -_RANGE, _RANGE)


def _reorder(x: Tensor, places: Tensor) -> Tensor:
    """[B, S, W] with the vectors of each sentence in the order of ``places`` [B, S]."""
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
