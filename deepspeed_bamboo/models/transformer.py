"""GPT-2 as a LayerSpec list, and its loss.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; layer by layer as ``GPT2LMHeadModel``
in transformers.
"""

from __future__ import annotations

import math
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.dropout import check_dropout
from deepspeed_bamboo.models.layers import Block, Head, PositionEmbedding, TokenEmbedding, tied_head
from deepspeed_bamboo.models.seeding import layer_seed
from deepspeed_bamboo.models.sizes import MODEL_SIZES, ModelSize

_TIED_KEY = "embedding"


def transformer_layers(size: ModelSize, *, dropout: float = 0.0, tied: bool | None = None, seed: int = 0) -> list[Any]:
    """The layers of a model for ``PipelineModule(layers=...)``: two embeddings, the blocks, a norm, a head.

    ``tied``: the head uses the embedding's weights; None: as the size says. ``seed``: initial weights are a function of
    it and of a layer's position, not of the number of stages nor of torch's generators.
    Raises ValueError for a dropout that is no probability, and for a size of a model that isn't causal.
    """
    if not size.causal:
        raise ValueError(f"{size.name} is no causal model; bert.bert_layers makes its layers")
    check_dropout(dropout)
    tied = size.tied if tied is None else tied
    seeds = [layer_seed(seed, position) for position in range(size.layers + 3)]
    block_settings = {
        "residual_std": 0.02 / math.sqrt(2 * size.layers),
        "causal": True,
        "fused": size.fused_attention,
        "dropout": dropout,
    }
    return [
        _embedding(size, tied=tied, seed=seeds[0]),
        LayerSpec(PositionEmbedding, size.sequence_length, size.width, dropout=dropout, seed=seeds[1]),
        *(LayerSpec(Block, size.width, size.heads, **block_settings, seed=layer_seed) for layer_seed in seeds[2:-1]),
        LayerSpec(nn.LayerNorm, size.width),
        _head(size, tied=tied, embedding_seed=seeds[0], head_seed=seeds[-1]),
    ]


def model_size(name: str) -> ModelSize:
    """The size called ``name``. Raises ValueError that lists the names there are."""
    if name not in MODEL_SIZES:
        raise ValueError(f"there is no model {name!r}; valid are: {', '.join(MODEL_SIZES)}")
    return MODEL_SIZES[name]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [B, S, V], labels [B, S] with -100 where nothing is asked."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _embedding(size: ModelSize, *, tied: bool, seed: int) -> Any:
    if not tied:
        return LayerSpec(TokenEmbedding, size.vocabulary, size.width, seed=seed)
    return TiedLayerSpec(_TIED_KEY, TokenEmbedding, size.vocabulary, size.width, seed=seed, tied_weight_attr="weight")


def _head(size: ModelSize, *, tied: bool, embedding_seed: int, head_seed: int) -> Any:
    if not tied:
        return LayerSpec(Head, size.width, size.vocabulary, seed=head_seed)
    return TiedLayerSpec(
        _TIED_KEY,
        TokenEmbedding,
        size.vocabulary,
        size.width,
        seed=embedding_seed,
        forward_fn=tied_head,
        tied_weight_attr="weight",
    )
