"""What a tied layer has beside its tied weights, on the stages that DeepSpeed's files leave out.

DeepSpeed saves a tied layer once, for the first stage that has it. The tied weights are alike on all stages, but a bias
or a table of positions beside them is each stage's own. A checkpoint has these values in the stage's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec

BESIDE_TIED = "bamboo_beside_tied_weights"
"""Under which key a stage's file has the values."""


def beside_tied_weights(module: Any) -> dict[str, Any]:
    """A part of the stage's file; without entries for a stage that needs none."""
    found = {name: tensor.detach().clone() for name, tensor in _left_out(module)}
    return {BESIDE_TIED: found} if found else {}


def accept_beside_tied_weights(module: Any, state: Any) -> None:
    """Give tied layers what the file ``state`` has for them, and take it out of there."""
    found: Mapping[str, torch.Tensor] = state.pop(BESIDE_TIED, {}) if isinstance(state, MutableMapping) else {}
    own = dict(_left_out(module))
    with torch.no_grad():
        for name in own.keys() & found.keys():
            own[name].copy_(found[name])


def _left_out(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, comm in module.tied_comms.items():
        first = next(spec for spec in module._layer_specs if isinstance(spec, TiedLayerSpec) and spec.key == key)
        if module.stage_owner(module._layer_specs.index(first)) == module.stage_id:
            continue
        tied = module.tied_modules[key]
        weights = [module._recursive_getattr(tied, name) for name in comm["weight_attr"]]
        for name, tensor in (*tied.named_parameters(), *tied.named_buffers()):
            if not any(tensor is weight for weight in weights):
                yield f"{key}.{name}", tensor
