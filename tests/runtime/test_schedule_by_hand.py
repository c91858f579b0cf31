"""What a script changes in the scheduler that it has reaches all stages of its worker, and is done again in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.schedule_by_hand import ScheduleByHand


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
