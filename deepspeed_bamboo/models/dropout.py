"""Dropout as a setting of a model."""

from __future__ import annotations

from torch import nn


def check_dropout(dropout: float) -> float:
    """``dropout``. Raises ValueError when it is no probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout} is no probability below 1; give 0 for none")
    return dropout


def dropout_layer(probability: float) -> nn.Module:
    """Dropout that draws nothing at all when its probability is 0."""
    return nn.Dropout(probability) if probability else nn.Identity()
