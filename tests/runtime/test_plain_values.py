"""What layers have as plain attributes, which scripts and forwards change."""

from __future__ import annotations

import types

import torch
from torch import nn

from deepspeed_bamboo.core.replica_differences import strayed
from deepspeed_bamboo.runtime.stock.plain_values import (
    MovingValues,
    accept_plain_of_the_script,
    accept_plain_values,
    plain_of_the_script,
    plain_values,
)


class Annealed(nn.Module):
    level = property(lambda self: 0, lambda self, value: None)

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature, self.calls, self.table = temperature, 0, {"not": "plain"}


def stage(*, last: bool) -> nn.Sequential:
    made = nn.Sequential(Annealed(1.0), nn.Linear(1, 1))
    made.stage_id, made.num_stages, made.loss_fn = int(last), 2, types.SimpleNamespace(smoothing=0.1, calls=0)
    return made


def test_only_what_has_ever_changed_moves_and_reaches_another_replica() -> None:
    owner, shadow, moving = stage(last=True), stage(last=True), MovingValues()
    assert moving.look(owner) == {} and moving.values(owner) == {}
    owner[0].temperature, owner.loss_fn.calls = 0.5, 3
    changed = {"0": {"temperature": 0.5}, "loss_fn": {"calls": 3}}
    assert moving.look(owner) == changed and moving.look(owner) == {}
    accept_plain_values(shadow, moving.values(owner))
    assert plain_values(shadow) == plain_values(owner)
    owner[0].temperature = 1.0
    assert moving.look(owner) == {"0": {"temperature": 1.0}}
    assert moving.values(owner) == {"0": {"temperature": 1.0}, "loss_fn": {"calls": 3}}


def test_the_loss_is_the_last_stages_and_training_is_nobodys() -> None:
    first = stage(last=False)
    assert set(plain_values(first)) == {"0", "1"} and "training" not in plain_values(first)["0"]
    accept_plain_values(first, {"loss_fn": {"calls": 7}, "0": {"made": 1, "level": 2}})
    assert first.loss_fn.calls == 0
    assert first[0].made == 1, "by a forward of its owner's, of which it has done none"
    assert first[0].level == 0, "its class has a rule for that"


def test_what_an_optimizer_of_the_script_counts_comes_along() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.t = 0

    one, other = (Counting([nn.Parameter(torch.zeros(1))]) for _ in range(2))
    one.t = 5
    accept_plain_of_the_script(other, plain_of_the_script(one))
    assert other.t == 5
    assert plain_of_the_script(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)) == {}
    assert plain_of_the_script(None) == {}


def test_a_shadow_that_has_strayed_is_named_with_what_differs() -> None:
    states = [
        {"owned": {"0.0": [1, 2]}, "shadows": {"0.1": [3, 5]}},
        {"owned": {"0.1": [3, 4]}, "shadows": {"0.0": [1, 2], "0.2": [9, 9]}},
        {},
    ]
    assert strayed(states) == ("0.1: buffers",)
    assert strayed([{"owned": {"0.0": [1, 2]}, "shadows": {"0.0": [2, 1]}}]) == ("0.0: weights and buffers",)
    assert strayed([]) == ()
