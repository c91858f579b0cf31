"""One dictionary of the weights of all stages."""

from __future__ import annotations

import torch

from deepspeed_bamboo.runtime.recovery.whole_state import add_stage


def test_a_tied_layer_is_the_first_stages_and_a_loss_functions_weights_are_the_last_ones() -> None:
    found: dict[str, torch.Tensor] = {}
    for stage in range(3):
        add_stage(found, {"tied_modules.e.bias": torch.tensor(stage), "loss_fn.scale": torch.tensor(stage)})
    assert {name: int(value) for name, value in found.items()} == {"tied_modules.e.bias": 0, "loss_fn.scale": 2}
