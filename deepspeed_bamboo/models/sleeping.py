"""Layers of known duration, which need no GPU and no core: for measuring how well work is shared."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class _Sleep(torch.autograd.Function):
    """The identity, which takes some seconds forward and twice as many backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2.0 * context.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """[B, WIDTH] -> [B, WIDTH]; a forward takes ``seconds``, a backward twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(torch.tanh(self.linear(x)), self.seconds)  # type: ignore[no-untyped-call]
        return result
