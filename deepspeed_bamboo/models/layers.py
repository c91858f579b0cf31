"""The layers of a transformer, each with initial weights that depend on its seed alone.

A layer draws its weights from a generator of its own: whatever the number of stages, whoever builds
the layer and when, the weights are the same, and torch's global generator stays where it was.

Shapes: B micro-batch, S sequence, W width, H heads, C = W / H, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.dropout import dropout_layer

INITIAL_STD = 0.02


class TokenEmbedding(nn.Module):
    """Tokens to vectors; tied models use the same weights as their head."""

    def __init__(self, vocabulary: int, width: int, *, seed: int) -> None:
        super().__init__()
        self.weight = _normal(vocabulary, width, generator=_generator(seed))  # [V, W]

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S, W]."""
        return functional.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """Adds where in the sequence a vector stands."""

    def __init__(self, sequence_length: int, width: int, *, dropout: float, seed: int) -> None:
        super().__init__()
        self.weight = _normal(sequence_length, width, generator=_generator(seed))  # [S, W]
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        return self.dropout(x + self.weight[: x.shape[1]])  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(
        self, width: int, heads: int, *, residual_std: float, causal: bool, fused: bool, dropout: float, seed: int
    ) -> None:
        super().__init__()
        generator = _generator(seed)
        self.heads = heads
        self.causal = causal
        self.fused = fused
        self.dropout_probability = dropout
        self.dropout = dropout_layer(dropout)
        self.into = seeded_linear(width, 3 * width, generator=generator)
        self.out = seeded_linear(width, width, generator=generator, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        batch, sequence, width = x.shape
        split = self.into(x).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, H, S, C]
        mixed = self._fused(query, key, value) if self.fused else self._plain(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))  # type: ignore[no-any-return]

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        probability = self.dropout_probability if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=self.causal)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain products and a softmax in fp32: no kernel that chooses its order of summation by itself."""
        scores = (query @ key.transpose(-2, -1)).float() / math.sqrt(query.shape[-1])  # [B, H, S, S]
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1).to(value.dtype)
        return self.dropout(weights) @ value  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer: attention, then a two-layer network, each added to its normalised input."""

    def __init__(
        self, width: int, heads: int, *, residual_std: float, causal: bool, fused: bool, dropout: float, seed: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(
            width, heads, residual_std=residual_std, causal=causal, fused=fused, dropout=dropout, seed=seed
        )
        generator = _generator(seed + 1)
        self.network_norm = nn.LayerNorm(width)
        self.widen = seeded_linear(width, 4 * width, generator=generator)
        self.narrow = seeded_linear(4 * width, width, generator=generator, std=residual_std)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.widen(self.network_norm(x)), approximate="tanh")  # [B, S, 4W]
        return x + self.dropout(self.narrow(hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Vectors to one score per token, with weights of its own."""

    def __init__(self, width: int, vocabulary: int, *, seed: int) -> None:
        super().__init__()
        self.weight = _normal(vocabulary, width, generator=_generator(seed))  # [V, W]

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, V]."""
        return functional.linear(x, self.weight)


def tied_head(embedding: TokenEmbedding, x: Tensor) -> Tensor:
    """The head of a tied model: [B, S, W] -> [B, S, V] with the embedding's weights."""
    return functional.linear(x, embedding.weight)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, generator: torch.Generator, std: float = INITIAL_STD) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(*shape))
    nn.init.normal_(weight, std=std, generator=generator)
    return weight


def seeded_linear(inputs: int, outputs: int, *, generator: torch.Generator, std: float = INITIAL_STD) -> nn.Linear:
    """A linear layer with normal weights from ``generator`` and no first bias."""
    place = torch.get_default_device()  # skip_init takes the CPU where it is not told
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, device=place)  # type: ignore[no-untyped-call]
    nn.init.normal_(linear.weight, std=std, generator=generator)
    nn.init.zeros_(linear.bias)
    return linear
