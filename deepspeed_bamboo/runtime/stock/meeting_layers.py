"""Layers that meet those of other workers in the middle of an iteration, which the plugin has no way to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from deepspeed.pipe import LayerSpec, PipelineModule

_EXPERTS = ("deepspeed.moe.", "deepspeed.module_inject.auto_ep")


def meeting_layers(module: PipelineModule, *, ranks: int) -> list[str]:
    """What is wrong with them, a sentence for each kind. ``ranks``: how many the job has at its start."""
    problems = {}
    for kind in _kinds(module):
        if any(base.__module__.startswith(_EXPERTS) for base in kind.__mro__):
            problems["experts"] = (
                f"the model has a layer {kind.__name__} of {kind.__module__}, and DeepSpeed's mixture of experts "
                "exchanges tokens and gradients in groups of its own, within an iteration; use a layer whose experts "
                "are all in its stage, or run this model without the plugin"
            )
        elif issubclass(kind, torch.nn.SyncBatchNorm) and ranks > 1:
            problems["statistics"] = (
                f"the model has a layer {kind.__name__}, whose workers exchange statistics within an iteration: after "
                "a loss they would be of fewer workers; use BatchNorm, which has those of its own micro-batch"
            )
    return list(problems.values())


def _kinds(module: PipelineModule) -> Iterator[type]:
    """Classes of the layers here, with what is in them, and of the other stages' layers as the list names them."""
    for part in module.modules():
        yield type(part)
    listed: Sequence[object] = getattr(module, "_layer_specs", ())
    for layer in listed:
        if isinstance(layer, LayerSpec) and isinstance(layer.typename, type):
            yield layer.typename
        elif isinstance(layer, torch.nn.Module):
            yield from (type(part) for part in layer.modules())
