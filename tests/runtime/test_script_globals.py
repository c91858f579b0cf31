"""Numbers and texts in global variables that layers read are what they were, for as long as a step is done again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.stock.script_globals import globals_again, globals_now
from tests.runtime.test_held_attributes import Stage

HERE = __name__
STEP, NAME, UNREAD, LISTED = 0, "warm", 0, [0]


class Inner(nn.Module):
    """Reads one, deep in another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (STEP + len(LISTED))


class Outer(nn.Module):
    """Not built here: its stage is another worker's."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def loss(scale: float, outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.mean() * scale * named()


def named() -> int:
    return len(NAME)


SPECS: list[Any] = [
    Stage(LayerSpec(nn.Linear, 2, 2), loss=functools.partial(loss, 2.0)),
    Stage(LayerSpec(nn.Sequential, Inner())),
]


@pytest.mark.parametrize("stage", SPECS, ids=["of a partial's function", "of a layer within a layer"])
def test_those_that_functions_of_its_modules_name(stage: Stage) -> None:
    found = globals_now([stage])
    assert found.keys() == {HERE}
    assert {name: found[HERE].get(name) for name in ("STEP", "NAME")} == {"STEP": 0, "NAME": "warm"}
    assert not found[HERE].keys() & {"UNREAD", "LISTED"}


def test_layers_of_other_stages_count_and_libraries_do_not() -> None:
    stage = Stage(LayerSpec(nn.Linear, 2, 2), loss=nn.functional.cross_entropy)
    assert globals_now([stage]) == {}
    stage._layer_specs = [LayerSpec(Outer), nn.functional.relu]
    assert globals_now([stage]).keys() == {HERE}


def test_they_are_todays_again_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SPECS[1]
    before = globals_now([stage])
    monkeypatch.setitem(globals(), "STEP", 7)
    x = torch.ones(1)
    assert float(stage.train_once(x)) == 8
    with pytest.raises(KeyError), globals_again(before):
        assert float(stage.train_once(x)) == 1
        raise KeyError
    assert STEP == 7 and float(stage.train_once(x)) == 8
    with globals_again({HERE: {"GONE": 1}, "no.such.module": {"STEP": 1}}):
        assert "GONE" not in globals() and STEP == 7


def test_a_worker_that_has_not_seen_other_values_begins_where_they_are_the_same() -> None:
    history = StepHistory()
    for step, value in enumerate((0, 0, 1, 1)):
        history.done(step, loss=0.0, named={HERE: {"STEP": value}})
    assert history.plain_from == 2
    assert history.of(1).named == {HERE: {"STEP": 0}} and history.of(2).named == {HERE: {"STEP": 1}}
