"""What layers cost: parameters, and operations of a forward; counted on torch's device "meta", without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# A layer's other work, in multiples of the memory that its output takes: reading, writing, launching.
_OPERATIONS_PER_NUMBER = 30


def count_parameters(layers: Sequence[Any]) -> int:
    """How many parameters the LayerSpecs ``layers`` have, tied ones once."""
    tied: set[str] = set()
    total = 0
    for spec, count in zip(layers, layer_parameters(layers), strict=True):
        key = getattr(spec, "key", None)
        if key is None or key not in tied:
            total += count
        if key is not None:
            tied.add(key)
    return total


def layer_parameters(layers: Sequence[Any]) -> list[int]:
    """How many parameters each of ``layers`` has. Those of tied layers count in each."""
    with torch.device("meta"):
        return [sum(parameter.numel() for parameter in spec.build().parameters()) for spec in layers]


def layer_costs(layers: Sequence[LayerSpec], sample: Any) -> list[int]:
    """The operations of each layer's forward for ``sample``, an input of the first layer as a batch.

    The values of ``sample`` do not matter. Each layer also counts for the numbers that it gives, so that none is free.
    """
    costs, x = [], _on_meta(sample)
    known: dict[Any, tuple[int, Any]] = {}
    with torch.device("meta"), torch.no_grad():
        for spec in layers:
            alike = _kind(spec), _shapes(x)
            if alike not in known:
                known[alike] = _forward(spec, x)
            cost, x = known[alike]
            costs.append(cost)
    return costs


def _forward(spec: LayerSpec, x: Any) -> tuple[int, Any]:
    layer, forward = spec.build(), getattr(spec, "forward_fn", None)
    with FlopCounterMode(display=False) as counter:
        output = layer(x) if forward is None else forward(layer, x)
    first = output if isinstance(output, Tensor) else output[0]
    return counter.get_total_flops() + _OPERATIONS_PER_NUMBER * first.numel(), output


def _kind(spec: LayerSpec) -> tuple[Any, ...]:
    """Equal for layers that differ in nothing but their first weights."""
    settings = sorted((name, value) for name, value in spec.module_kwargs.items() if name != "seed")
    return spec.typename, getattr(spec, "forward_fn", None), repr(spec.module_args), repr(settings)


def _shapes(x: Any) -> tuple[Any, ...]:
    return tuple(tuple(part.shape) for part in ((x,) if isinstance(x, Tensor) else x))


def _on_meta(sample: Any) -> Any:
    return sample.to("meta") if isinstance(sample, Tensor) else tuple(_on_meta(part) for part in sample)
