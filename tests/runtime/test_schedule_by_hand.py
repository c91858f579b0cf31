"""What a script changes in the scheduler that it has reaches all stages of its worker, and is done again in a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import lr_scheduler as torchs

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.one_stage_only import OneStageOnly
from deepspeed_bamboo.runtime.stock.schedule_by_hand import ScheduleByHand
from deepspeed_bamboo.runtime.stock.scheduler_parts import parts_of


def stage(number: int, kind: Any = WarmupLR, **options: Any) -> Any:
    """A stage after a step, with its scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = kind(optimizer, **options)
    optimizer.step()
    scheduler.step()
    attributes = {"basic_optimizer": optimizer, "lr_scheduler": scheduler}
    return SimpleNamespace(
        coordinate=Coordinate(0, number), attributes=attributes, built_scheduler=scheduler, finish_step=lambda: None
    )


def scheduler_of(one: Any) -> Any:
    return one.attributes["lr_scheduler"]


def test_what_is_changed_in_one_is_changed_in_all_that_had_the_same() -> None:
    stages = [stage(n) for n in range(3)]
    scheduler_of(stages[2]).max_lrs = [7.0]
    looks = ScheduleByHand()
    looks.leave(stages[0])
    assert looks.follow(stages[0], stages) == ()
    scheduler_of(stages[0]).max_lrs = [0.5]
    scheduler_of(stages[0]).last_batch_iteration = -1
    changes = looks.follow(stages[0], stages)
    assert sorted(change.name for change in changes) == ["last_batch_iteration", "max_lrs"]
    assert [scheduler_of(one).max_lrs for one in stages] == [[0.5], [0.5], [7.0]]
    assert [scheduler_of(one).last_batch_iteration for one in stages] == [-1, -1, -1]
    assert scheduler_of(stages[1]).max_lrs is not scheduler_of(stages[0]).max_lrs
    assert looks.follow(stages[0], stages) == ()


def test_a_scheduler_that_the_script_steps_itself_is_stepped_in_all() -> None:
    kind = torch.optim.lr_scheduler.LambdaLR
    stages = [stage(n, kind, lr_lambda=lambda step: 0.5**step) for n in range(2)]
    looks = ScheduleByHand()
    looks.leave(stages[0])
    scheduler_of(stages[0]).step()
    looks.follow(stages[0], stages)
    assert [scheduler_of(one).last_epoch for one in stages] == [2, 2]


def test_a_step_that_is_done_again_has_what_was_changed_before_it() -> None:
    """What is in a scheduler's state has come back with that; the rest is put back by hand."""
    stages = [stage(n) for n in range(2)]
    looks, saved = ScheduleByHand(), [scheduler_of(one).state_dict() for one in stages]
    looks.leave(stages[0])
    scheduler_of(stages[0]).max_lrs, scheduler_of(stages[0]).last_batch_iteration = [0.5], 9
    changes = looks.follow(stages[0], stages)
    for one, state in zip(stages, saved, strict=True):
        scheduler_of(one).load_state_dict(state)
    looks.restored(stages, changes)
    assert [(scheduler_of(one).max_lrs, scheduler_of(one).last_batch_iteration) for one in stages] == [([0.1], 0)] * 2
    looks.write_again(stages, changes)
    assert [(scheduler_of(one).max_lrs, scheduler_of(one).last_batch_iteration) for one in stages] == [([0.5], 9)] * 2


def test_on_its_way_to_the_jobs_step_a_script_changes_only_what_no_checkpoint_has() -> None:
    stages = [stage(n) for n in range(2)]
    looks = ScheduleByHand()
    looks.leave(stages[0])
    scheduler_of(stages[0]).max_lrs, scheduler_of(stages[0]).last_batch_iteration = [0.5], -1
    looks.come_back(stages[0], stages)
    assert [(scheduler_of(one).max_lrs, scheduler_of(one).last_batch_iteration) for one in stages] == [([0.5], 0)] * 2
    assert looks.follow(stages[0], stages) == ()


def test_a_scheduler_of_the_scripts_own_and_a_worker_without_stages_are_left_alone() -> None:
    one, looks = stage(0), ScheduleByHand()
    one.built_scheduler = None
    looks.leave(one)
    scheduler_of(one).max_lrs = [0.5]
    assert looks.follow(one, [one]) == looks.follow(None, []) == ()
    looks.come_back(None, [])


class Falling:
    """A function of a script's own for LambdaLR, with a number to set."""

    def __init__(self) -> None:
        self.steps = 10

    def __call__(self, step: int) -> float:
        return 1 - step / self.steps


def warmed_up(optimizer: Any) -> Any:
    return torchs.SequentialLR(
        optimizer, [torchs.LinearLR(optimizer, 0.1, total_iters=2), torchs.CosineAnnealingLR(optimizer, 10)], [2]
    )


def chained(optimizer: Any) -> Any:
    return torchs.ChainedScheduler([torchs.ExponentialLR(optimizer, 0.9), warmed_up(optimizer)])


def set_milestone(its: Any) -> None:
    its.milestones[3] = 1


INSIDE: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "T_max": (warmed_up, lambda its: setattr(its._schedulers[1], "T_max", 40)),
    "gamma": (chained, lambda its: setattr(its._schedulers[0], "gamma", 0.5)),
    "_milestones": (chained, lambda its: setattr(its._schedulers[1], "_milestones", [4])),
    "milestones": (lambda optimizer: torchs.MultiStepLR(optimizer, [9]), set_milestone),
    "steps": (
        lambda optimizer: torchs.LambdaLR(optimizer, Falling()),
        lambda its: setattr(its.lr_lambdas[0], "steps", 20),
    ),
}


def rates_after(stages: list[Any], *, steps: int) -> list[float]:
    for one in stages:
        for _ in range(steps):
            one.attributes["basic_optimizer"].step()
            scheduler_of(one).step()
    return [one.attributes["basic_optimizer"].param_groups[0]["lr"] for one in stages]


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_changed_inside_of_one_is_changed_in_all_and_comes_back_with_its_state(name: str) -> None:
    kind, change = INSIDE[name]
    alone, unchanged, *stages = [stage(n, kind) for n in range(4)]
    change(scheduler_of(alone))
    looks, saved = ScheduleByHand(), [scheduler_of(one).state_dict() for one in stages]
    looks.leave(stages[0])
    change(scheduler_of(stages[0]))
    changes = looks.follow(stages[0], stages)
    assert [its.name for its in changes] == [name]
    for one, state in zip(stages, saved, strict=True):
        scheduler_of(one).load_state_dict(state)
    looks.restored(stages, changes)
    assert parts_of(scheduler_of(stages[1])).keys() == parts_of(scheduler_of(unchanged)).keys()
    looks.write_again(stages, changes)
    rates = rates_after([alone, unchanged, *stages], steps=5)
    assert rates[2] == rates[3] == rates[0] != rates[1]


def test_on_its_way_a_script_changes_inside_only_what_no_checkpoint_has() -> None:
    stages = [stage(n, warmed_up) for n in range(2)]
    looks = ScheduleByHand()
    looks.leave(stages[0])
    scheduler_of(stages[0])._schedulers[1].T_max = 40
    looks.come_back(stages[0], stages)
    assert [scheduler_of(one)._schedulers[1].T_max for one in stages] == [10, 10]


def test_what_can_not_be_carried_inside_of_one_is_said() -> None:
    stages = [stage(n, warmed_up) for n in range(2)]
    for one in stages:
        one.module = torch.nn.Linear(1, 1)
        one.attributes["optimizer"] = one.attributes["basic_optimizer"]
    alone = OneStageOnly()
    alone.leave(stages)
    assert alone.follow(stages[0], stages) == ""
    its = scheduler_of(stages[0])
    its._schedulers[1] = torchs.CosineAnnealingLR(its.optimizer, 40)
    assert "has changed the scheduler of stage 0.0, and not of 0.1" in alone.follow(stages[0], stages)
