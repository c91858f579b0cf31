"""The layers of a pipeline that holds a causal language model of transformers.

Each holds parts of the library's model and knows their names there. What goes from one to the next is the hidden
states [B, S, H], or, where a micro-batch has a mask or positions, a tuple of them with these (each [B, S]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_bamboo.models.huggingface.skeleton import Skeleton, escaped, unescaped
from deepspeed_bamboo.models.huggingface.weights import Weights

Flow = Tensor | tuple[Tensor, ...]
"""Hidden states (or, before the first layer, tokens), then the mask, then the positions, where there are any."""


class LibraryLayer(nn.Module):
    """Holds parts of the library's model.

    Args:
        skeleton: of the model.
        weights: where those of the parts come from.
        position: of this layer in the pipeline.
        paths: names of the parts in the library's model.
    """

    def __init__(self, skeleton: Skeleton, weights: Weights, position: int, paths: Sequence[str]) -> None:
        super().__init__()
        self.skeleton, self.position = skeleton, position
        self.parts = nn.ModuleDict({escaped(path): weights.part(skeleton, path) for path in paths})

    def library_state(self) -> dict[str, Tensor]:
        """Weights and buffers by their names in the library's model."""
        return {
            f"{unescaped(key)}.{name}": tensor
            for key, part in self.parts.items()
            for name, tensor in part.state_dict().items()
        }


class TokenEmbedding(LibraryLayer):
    """Tokens to vectors; in a tied model the head uses the same weights."""

    @property
    def weight(self) -> nn.Parameter:
        """[V, H]."""
        (part,) = self.parts.values()
        return part.weight  # type: ignore[return-value]

    def forward(self, flow: Flow) -> Flow:
        """Tokens [B, S] int64, maybe with mask and positions, -> [B, S, H] with the same."""
        (part,) = self.parts.values()
        tokens, *rest = _parts(flow)
        return _flow(part(tokens), rest)


class BeforeLayers(LibraryLayer):
    """What a model does between its embedding and its first layer: embeddings of positions, dropout, scales."""

    def forward(self, flow: Flow) -> Flow:
        """[B, S, H] -> [B, S, H]."""
        embedded, *rest = _parts(flow)
        return _flow(self.skeleton.enter(embedded, *_mask_and_positions(rest), self.parts), rest)


class DecoderLayer(LibraryLayer):
    """One of the model's decoder layers, ``index`` of all."""

    def __init__(self, skeleton: Skeleton, weights: Weights, position: int, index: int) -> None:
        super().__init__(skeleton, weights, position, [skeleton.blocks[index]])
        self.index = index

    def forward(self, flow: Flow) -> Flow:
        """[B, S, H] -> [B, S, H]."""
        (part,) = self.parts.values()
        hidden, *rest = _parts(flow)
        call = self.skeleton.calls(hidden, *_mask_and_positions(rest))[self.index]
        output = part(hidden, *call.arguments, **call.keywords)
        return _flow(output[0] if isinstance(output, tuple) else output, rest)


class AfterLayers(LibraryLayer):
    """What a model does after its last layer: a norm."""

    def forward(self, flow: Flow) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.skeleton.leave(_parts(flow)[0], self.parts)


class Head(LibraryLayer):
    """Vectors to one score per token, with weights of its own."""

    def forward(self, flow: Flow) -> Tensor:
        """[B, S, H] -> [B, S, V]."""
        (part,) = self.parts.values()
        return self.skeleton.logits(_parts(flow)[0], part)


def tied_head(embedding: TokenEmbedding, flow: Flow) -> Tensor:
    """The head of a tied model: [B, S, H] -> [B, S, V]."""
    return embedding.skeleton.tied_logits(_parts(flow)[0], embedding.weight)


def _parts(flow: Flow) -> tuple[Tensor, ...]:
    return (flow,) if isinstance(flow, torch.Tensor) else tuple(flow)


def _mask_and_positions(rest: Sequence[Tensor]) -> tuple[Any, Any]:
    return (*rest, None, None)[:2]  # type: ignore[return-value]


def _flow(hidden: Tensor, rest: Sequence[Tensor]) -> Flow:
    return (hidden, *rest) if rest else hidden
