"""A worker that hosts several stages from the start keeps them apart, as if each had a process of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepspeed_bamboo.runtime.stock.start_block import StageLayers, StartBlock


class Part(nn.Module):
    """A layer of its own, and one that other stages use, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(2, 2), shared


def block_of(layers: dict[int, StageLayers], *, primary: int) -> StartBlock:
    start: Any = SimpleNamespace(seat=SimpleNamespace(primary=SimpleNamespace(stage=primary)))
    block = StartBlock(start)
    block.layers = layers
    return block


def test_what_several_stages_use_becomes_each_ones_own() -> None:
    shared = nn.Linear(2, 2)
    shared.weight.register_hook(lambda gradient: gradient * 3)
    shared.weight.note = "kept"  # type: ignore[attr-defined]
    parts = [Part(shared) for _ in range(3)]
    parts[2].own.weight.register_hook(lambda gradient: gradient * 5)
    layers = {1: StageLayers(0, 1, {"0": parts[0]}), 2: StageLayers(1, 3, {"1": parts[1], "2": parts[2]})}
    untouched = [part.own.weight for part in parts]
    block_of(layers, primary=1)._separate()
    first, second, third = layers[1].children["0"], layers[2].children["1"], layers[2].children["2"]
    assert first is parts[0] and first.shared is shared
    assert second.shared is third.shared and second.shared is not shared, "a stage itself uses it twice"
    copied = second.shared.weight
    assert copied is not shared.weight and torch.equal(copied, shared.weight) and copied.note == "kept"
    own = [part.own.weight for part in (first, second, third)]
    assert all(new is old for new, old in zip(own, untouched, strict=True)), "its own parameters stay what they are"
    sum(part.shared.weight.sum() + part.own.weight.sum() for part in (first, second, third)).backward()
    assert shared.weight.grad[0, 0] == 3 and copied.grad[0, 0] == 6, "each has the hook once"
    assert (second.own.weight.grad[0, 0], third.own.weight.grad[0, 0]) == (1, 5)


def test_stages_that_share_nothing_stay_as_they_are() -> None:
    parts = [Part(nn.Linear(2, 2)) for _ in range(2)]
    layers = {0: StageLayers(0, 1, {"0": parts[0]}), 1: StageLayers(1, 2, {"1": parts[1]})}
    block_of(layers, primary=0)._separate()
    assert layers[0].children["0"] is parts[0] and layers[1].children["1"] is parts[1]
