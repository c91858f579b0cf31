"""What a stage's file has of a tied layer beside its tied weights. With losses: test_checkpoints.py, ``tied-1x3``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from deepspeed_bamboo.runtime.checkpoint.beginning import LEFT_OUT
from deepspeed_bamboo.runtime.stock.beside_tied import BESIDE_TIED, accept_beside_tied_weights, beside_tied_weights


class Table(torch.nn.Module):
    """Tied by its weight; the shift and the count are each stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.shift = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(()))


def stage(number: int) -> Any:
    """As a PipelineModule with one layer a stage, the first and the last of three tied."""
    table = Table()
    specs = [TiedLayerSpec("table", Table), LayerSpec(torch.nn.Linear, 2, 2), TiedLayerSpec("table", Table)]
    return SimpleNamespace(
        tied_comms={"table": {"weight_attr": ["weight"], "module": table}} if number != 1 else {},
        tied_modules={"table": table},
        _layer_specs=specs,
        stage_owner=lambda index: index,
        stage_id=number,
        _recursive_getattr=getattr,
    )


def test_the_last_stage_keeps_its_own_values_and_no_others() -> None:
    saved, other = stage(2), stage(2)
    with torch.no_grad():
        saved.tied_modules["table"].shift.add_(3.0)
        saved.tied_modules["table"].count.add_(4.0)
        saved.tied_modules["table"].weight.add_(5.0)
    state = {"epoch": 7, **beside_tied_weights(saved)}
    accept_beside_tied_weights(other, state)
    found = other.tied_modules["table"]
    assert found.shift.tolist() == [3.0, 3.0] and found.count.item() == 4.0
    assert found.weight.tolist() == [1.0, 1.0], "which DeepSpeed's own files have"
    assert state == {"epoch": 7}, "the script gets what it has saved"


def test_stages_whose_files_lack_nothing_have_no_entry() -> None:
    assert beside_tied_weights(stage(0)) == {} and beside_tied_weights(stage(1)) == {}
    assert BESIDE_TIED in LEFT_OUT
    for state in (None, {}, {"epoch": 7}):
        accept_beside_tied_weights(stage(2), state)
