"""A script whose optimizer and scheduler are one stage's, where its worker has several: what is said of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.one_stage_only import OneStageOnly


def stage(number: int) -> Any:
    """A stage with a layer, its optimizer after a step, and its scheduler."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    attributes = {"basic_optimizer": optimizer, "optimizer": optimizer, "lr_scheduler": scheduler}
    return SimpleNamespace(
        coordinate=Coordinate(0, number), module=module, attributes=attributes, built_scheduler=scheduler
    )


def halve_state(one: Any) -> None:
    for state in one.attributes["optimizer"].state.values():
        state["exp_avg"].mul_(0.5)


def clamp_weights(one: Any) -> None:
    with torch.no_grad():
        for group in one.attributes["optimizer"].param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def begin_the_schedule_anew(one: Any) -> None:
    one.attributes["lr_scheduler"].last_epoch = 7


def load_again(one: Any) -> None:
    one.attributes["optimizer"].load_state_dict(copy.deepcopy(one.attributes["optimizer"].state_dict()))


CHANGES: dict[str, Callable[[Any], None]] = {
    "optimizer state": halve_state,
    "weights": clamp_weights,
    "the scheduler": begin_the_schedule_anew,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_of_one_stage_alone_is_said_and_of_all_is_not(what: str) -> None:
    stages, looks = [stage(0), stage(1)], OneStageOnly()
    looks.leave(stages)
    assert looks.follow(stages[0], stages) == ""
    CHANGES[what](stages[0])
    assert f"has changed {what} of stage 0.0, and not of 0.1" in looks.follow(stages[0], stages)
    CHANGES[what](stages[1])
    assert looks.follow(stages[0], stages) == ""


def test_loading_a_state_counts_and_so_do_several_at_once() -> None:
    stages, looks = [stage(0), stage(1)], OneStageOnly()
    looks.leave(stages)
    load_again(stages[0])
    clamp_weights(stages[0])
    assert "has changed weights and optimizer state of stage 0.0" in looks.follow(stages[0], stages)


def test_a_lone_stage_a_newcomer_and_a_scheduler_of_the_scripts_own_are_no_reason() -> None:
    stages, looks = [stage(0), stage(1)], OneStageOnly()
    looks.leave(stages[:1])
    halve_state(stages[0])
    assert looks.follow(stages[0], stages[:1]) == looks.follow(None, stages) == ""
    looks.leave(stages)
    halve_state(stages[0])
    assert looks.follow(stages[0], [stages[0], stage(2)]) == ""
    looks.forget()
    assert looks.follow(stages[0], stages) == ""
    stages[0].built_scheduler = None
    looks.leave(stages)
    begin_the_schedule_anew(stages[0])
    assert looks.follow(stages[0], stages) == ""
