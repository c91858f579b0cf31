"""The costs of layers: parameters, and operations of a forward; counted on torch's device "meta", without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor
from torch.overrides import TorchFunctionMode
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


def layer_activations(layers: Sequence[LayerSpec], sample: Any) -> list[int]:
    """Bytes that each layer's forward of ``sample``, a batch of one in fp32, keeps for its backward.

    Parameters are not among them. The input of a layer counts where its backward needs it, and so may count twice: as
    the output of the layer before, and here; as it does where the two are in different stages.
    """
    return _activations(layers, sample)[0]


def activations_with_loss(layers: Sequence[LayerSpec], sample: Any) -> list[int]:
    """As :func:`layer_activations`; with the last layer also what a loss keeps: the output, and as much again."""
    kept, output = _activations(layers, sample)
    sizes = [part.nbytes for part in ((output,) if isinstance(output, Tensor) else output)]
    return [*kept[:-1], kept[-1] + 2 * sum(sizes)]


def _activations(layers: Sequence[LayerSpec], sample: Any) -> tuple[list[int], Any]:
    kept, x = [], _on_meta(sample)
    known: dict[Any, tuple[int, Any]] = {}
    with torch.device("meta"), _FusedAttention():
        for spec in layers:
            alike = _kind(spec), _shapes(x)
            if alike not in known:
                known[alike] = kept_bytes(spec.build(), x, forward=getattr(spec, "forward_fn", None))
            size, x = known[alike]
            kept.append(size)
    return kept, x


def kept_bytes(layer: torch.nn.Module, x: Any, *, forward: Any = None) -> tuple[int, Any]:
    """Bytes that a forward of ``layer`` keeps for its backward, and its output, as input of the next layer."""
    own = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    kept: dict[int, Any] = {}  # storages, which stay alive here, so that each has another address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    inputs = _leaves(x)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(inputs) if forward is None else forward(layer, inputs)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own), _leaves(output)


class _FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels of GPUs do it, which keep no scores. Device "meta" would do it step by step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention and len(args) > 2 and args[0].requires_grad:
            return _Mixed.apply(*args[:3])  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Mixed(torch.autograd.Function):
    """What fused attention keeps: queries, keys, values and the output."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        context.save_for_backward(query, key, value, output)
        return output


def _leaves(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().requires_grad_(x.is_floating_point())
    return tuple(_leaves(part) for part in x)


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
