"""Layers whose gradients torch makes sparse, which can't be sent to a shadow."""

from __future__ import annotations

import torch

REMEDY = 'build it with sparse=False, or set bamboo.redundancy.mode to "off"'


def sparse_layers(module: torch.nn.Module) -> list[str]:
    """Each trained embedding with ``sparse=True`` in ``module``: its name and class."""
    return [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad
    ]


def has_sparse(gradients: list[torch.Tensor]) -> bool:
    """Whether one of ``gradients`` is sparse, as those of ``torch.nn.functional.embedding(..., sparse=True)``."""
    return any(gradient.layout != torch.strided for gradient in gradients)
