"""Stages that take equally long: layers are weighed by the arithmetic of their forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import partition_balanced


class BalancedPipeline(PipelineModule):
    """A PipelineModule whose stages are balanced by the costs of their layers.

    ``partition_method="parameters"`` balances what DeepSpeed counts, which here are ``costs``: convolutions have few
    parameters and take long. Other methods are as in PipelineModule.
    """

    def __init__(self, layers: Sequence[Any], *, costs: Sequence[int], **arguments: Any) -> None:
        """``costs``: one for each of ``layers``, in any unit, as costs.layer_costs gives them."""
        self.costs = list(costs)  # PipelineModule asks for them while it is made
        super().__init__(layers=layers, **arguments)

    def _count_layer_params(self) -> list[int]:
        return self.costs


def balanced_parts(costs: Sequence[int], stages: int) -> list[int]:
    """Where stages begin, and behind them where the last one ends, as a BalancedPipeline has them."""
    return [int(start) for start in partition_balanced(weights=list(costs), num_parts=stages)]
