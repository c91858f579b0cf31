"""What a script holds of its optimizer and scheduler stands for another stage's once its own stage is elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.held_objects import HeldObjects
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class Wrapper:
    """As DeepSpeed's: around a torch optimizer, whose groups it shows."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.cur_scale = optimizer, 1.0

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def stage(number: int, *, groups: int = 2, rate: float = 0.1) -> StageReplica:
    """A stage that has taken one step at ``rate``."""
    parameters = [torch.nn.Parameter(torch.full((2,), float(number))) for _ in range(groups)]
    basic = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(basic, step_size=1, gamma=0.5)
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    basic.step()
    attributes = {"optimizer": Wrapper(basic), "basic_optimizer": basic, "lr_scheduler": scheduler}
    return StageReplica(Coordinate(0, number), attributes, [], built_scheduler=scheduler)


def test_all_that_a_script_holds_shows_and_changes_the_stage_that_acts() -> None:
    mine, acting = stage(0, rate=0.1), stage(1, rate=0.2)
    script = SimpleNamespace(**mine.attributes)
    groups, group = script.optimizer.param_groups, script.optimizer.param_groups[1]
    held = HeldObjects(mine)
    assert mine.held_by_script and held.can_stand_for(acting)
    held.stand_for(acting)
    its = acting.attributes
    for one in (groups[1], group, script.optimizer.param_groups[1], script.basic_optimizer.param_groups[1]):
        assert one["lr"] == 0.2 and one is its["basic_optimizer"].param_groups[1]
    group["lr"] = 0.05
    assert its["optimizer"].param_groups[1]["lr"] == 0.05
    its["optimizer"].cur_scale = 8.0
    assert script.optimizer.cur_scale == 8.0
    assert script.basic_optimizer.state_dict()["state"][0]["step"] == 1
    script.lr_scheduler.step()
    assert its["lr_scheduler"].last_epoch == 1 and its["optimizer"].param_groups[0]["lr"] == 0.1
    before = its["basic_optimizer"].param_groups[0]["params"][0].clone()
    its["basic_optimizer"].step()
    assert not torch.equal(before, its["basic_optimizer"].param_groups[0]["params"][0])


def test_a_stage_that_acts_no_more_goes_on_by_itself() -> None:
    mine, second, third = stage(0), stage(1, rate=0.2), stage(2, rate=0.4)
    script, held = mine.attributes["optimizer"], HeldObjects(mine)
    held.stand_for(second)
    held.stand_for(third)
    script.param_groups[0]["lr"] = 0.05
    assert third.attributes["basic_optimizer"].param_groups[0]["lr"] == 0.05
    assert second.attributes["basic_optimizer"].param_groups[0]["lr"] == 0.2
    assert second.attributes["basic_optimizer"].param_groups[0]["params"][0][0] < 1.0
    assert held.includes(mine.attributes["basic_optimizer"]) and not held.includes(second.attributes["optimizer"])


def test_a_stage_with_other_groups_is_none_to_stand_for() -> None:
    held = HeldObjects(stage(0))
    assert not held.can_stand_for(stage(1, groups=1))
    plain = stage(2)
    plain.attributes["optimizer"] = plain.attributes["basic_optimizer"]
    assert not held.can_stand_for(plain)
