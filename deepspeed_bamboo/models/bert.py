"""BERT with both of its pre-training tasks as a LayerSpec list, and their loss.

Source: Devlin et al., arXiv 1810.04805; layer by layer as ``BertForPreTraining`` in transformers.

Shapes: B micro-batch, S sequence, W width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.dropout import check_dropout, dropout_layer
from deepspeed_bamboo.models.layers import INITIAL_STD, Attention, TokenEmbedding, seeded_linear
from deepspeed_bamboo.models.seeding import layer_seed
from deepspeed_bamboo.models.sizes import ModelSize

_TIED_KEY = "embedding"
_EPSILON = 1e-12
_SEGMENTS = 2


class Places(nn.Module):
    """Adds to each vector where it stands and in which of the two segments, and normalises."""

    def __init__(self, sequence_length: int, width: int, *, dropout: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.position = nn.Parameter(torch.empty(sequence_length, width))
        self.segment = nn.Parameter(torch.empty(_SEGMENTS, width))
        for table in (self.position, self.segment):
            nn.init.normal_(table, std=INITIAL_STD, generator=generator)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = dropout_layer(dropout)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Vectors [B, S, W] and segments [B, S] int64 -> [B, S, W]."""
        x, segments = inputs
        x = x + functional.embedding(segments, self.segment) + self.position[: x.shape[1]]
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]


class PostNormBlock(nn.Module):
    """One layer of BERT: attention, then a two-layer network, each normalised after it was added to its input."""

    def __init__(self, width: int, heads: int, *, fused: bool, dropout: float, seed: int) -> None:
        super().__init__()
        attention = {"residual_std": INITIAL_STD, "causal": False, "fused": fused, "dropout": dropout, "seed": seed}
        self.attention = Attention(width, heads, **attention)  # type: ignore[arg-type]
        self.attention_norm = nn.LayerNorm(width, eps=_EPSILON)
        generator = torch.Generator().manual_seed(seed + 1)
        self.widen = seeded_linear(width, 4 * width, generator=generator)
        self.narrow = seeded_linear(4 * width, width, generator=generator)
        self.network_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        hidden = functional.gelu(self.widen(x))  # [B, S, 4W]
        return self.network_norm(x + self.dropout(self.narrow(hidden)))  # type: ignore[no-any-return]


class PretrainingHead(nn.Module):
    """All of the two heads but the product with the embedding's weights, which the next layer does.

    The bias of that product is one of this layer's outputs, so that the next layer has no weights but the tied ones.
    """

    def __init__(self, width: int, vocabulary: int, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.pooler = seeded_linear(width, width, generator=generator)
        self.follows = seeded_linear(width, 2, generator=generator)
        self.transform = seeded_linear(width, width, generator=generator)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, W] -> [B, S, W], whether the second segment follows the first [B, 2], bias [V]."""
        follows = self.follows(torch.tanh(self.pooler(x[:, 0])))
        return self.norm(functional.gelu(self.transform(x))), follows, self.bias.clone()


def bert_layers(size: ModelSize, *, dropout: float | None = None, seed: int = 0) -> list[Any]:
    """The layers of a BERT for ``PipelineModule``: (tokens, segments), [B, S] int64 each -> the inputs of bert_loss.

    All positions are attended to: samples are full, without padding. ``dropout``: None for the size's own.
    Raises ValueError for a dropout that is no probability, and for a size of a causal model.
    """
    if size.causal:
        raise ValueError(f"{size.name} is a causal model and no BERT; give a size with causal=False")
    dropout = check_dropout(size.dropout if dropout is None else dropout)
    seeds = [layer_seed(seed, position) for position in range(size.layers + 3)]
    block = {"fused": size.fused_attention, "dropout": dropout}
    return [
        _tied(size, embed_first, seed=seeds[0]),
        LayerSpec(Places, size.sequence_length, size.width, dropout=dropout, seed=seeds[1]),
        *(LayerSpec(PostNormBlock, size.width, size.heads, **block, seed=own) for own in seeds[2:-1]),
        LayerSpec(PretrainingHead, size.width, size.vocabulary, seed=seeds[-1]),
        _tied(size, score_last, seed=seeds[0]),
    ]


def embed_first(embedding: TokenEmbedding, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and segments, [B, S] int64 each -> vectors [B, S, W] and the segments."""
    tokens, segments = inputs
    return embedding(tokens), segments


def score_last(embedding: TokenEmbedding, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The output of PretrainingHead -> scores of tokens [B, S, V], and whether the second segment follows [B, 2]."""
    x, follows, bias = inputs
    return functional.linear(x, embedding.weight, bias), follows


def bert_loss(scores: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Sum of the mean cross-entropies of both tasks, in nats.

    ``labels`` [B, S] int64: of position 0, which is never masked, whether the second segment is another text's (1) or
    follows the first (0); of the others the hidden tokens, and -100 where nothing is asked.
    """
    tokens, follows = scores
    hidden = functional.cross_entropy(tokens[:, 1:].float().flatten(0, 1), labels[:, 1:].flatten())
    return hidden + functional.cross_entropy(follows.float(), labels[:, 0])


def _tied(size: ModelSize, forward: Any, *, seed: int) -> Any:
    shape = size.vocabulary, size.width
    return TiedLayerSpec(_TIED_KEY, TokenEmbedding, *shape, forward_fn=forward, tied_weight_attr="weight", seed=seed)
