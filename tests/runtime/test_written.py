"""What a script writes by hand beside parameter groups is written again before steps that are done again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.stock.clipping import ClippingByHand
from deepspeed_bamboo.runtime.stock.root_values import RootByHand
from deepspeed_bamboo.runtime.stock.scale_by_hand import ScaleByHand
from deepspeed_bamboo.runtime.stock.written import Written


class Own(PipelineModule):
    """With attributes of its own, as one stage's module is; no constructor, which needs processes."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.activation_checkpoint_interval, self.is_checkpointable_results_interval = 0, None
        self.stage_id, self.forward_funcs = 0, []
        self.factors, self.owner, self.calls = (1.0,), lambda: self, 0
        self.precomputed: list[int] = []

    def _precompute_checkpointable_values(self) -> None:
        self.precomputed.append(self.activation_checkpoint_interval)


def test_the_root_is_what_it_was_then_and_what_was_set_is_set_again() -> None:
    root, own, other = RootByHand(lambda _: None), Own(), Own()
    modules: list[Any] = [own, other]
    root.leave(own)
    before = own.factors
    own.factors, own.late = (0.8,), 2.0
    own.activation_checkpoint_interval = own.is_checkpointable_results_interval = 2
    first = root.follow(own, modules)
    assert root.follow(own, modules) == (), "once"
    own.factors, own.owner, now = (0.5,), lambda: own, own.owner
    second = root.follow(own, modules)
    past = Written(root=first) + Written(root=second)
    root.restored(own, modules, past.root)
    for module in modules:
        assert module.factors is before and not hasattr(module, "late") and module.activation_checkpoint_interval == 0
        assert module.owner() is module
    assert own.owner is now and root.follow(own, modules) == (), "that is nothing which the script has set"
    root.write_again(own, modules, first)
    assert [(module.factors, module.late) for module in modules] == [((0.8,), 2.0)] * 2
    assert [module.precomputed[-1] for module in modules] == [2, 2]
    root.write_again(own, modules, second)
    assert [module.factors for module in modules] == [(0.5,)] * 2 and root.follow(own, modules) == ()


def test_what_forwards_move_on_the_root_stays_where_a_restored_state_has_it() -> None:
    root, own = RootByHand(lambda _: None), Own()
    root.leave(own)
    own.calls = 5
    [change] = root.follow(own, [own])
    own.calls += 1  # by a forward
    root.leave(own)
    own.calls = 3  # by the state
    root.restored(own, [own], (change,))
    assert own.calls == 3


def replica(stage: int, optimizer: Any) -> Any:
    return SimpleNamespace(coordinate=Coordinate(0, stage), attributes={"optimizer": optimizer})


def test_a_bound_of_gradients_that_was_set_once_is_set_again_and_stays() -> None:
    clipping = ClippingByHand()
    mine, other, shadow = (SimpleNamespace(clip_grad=1.0) for _ in range(3))
    owners, everything = (
        [replica(0, mine), replica(1, other)],
        [replica(0, mine), replica(1, other), replica(2, shadow)],
    )
    clipping.leave([mine])
    assert clipping.follow([mine], owners) == ()
    mine.clip_grad = 0.5
    assert clipping.follow([mine], owners) == (0.5,) and other.clip_grad == 0.5
    assert clipping.follow([mine], owners) == (), "once"
    clipping.stepped([mine], everything, shadows={Coordinate(0, 2)})
    mine.clip_grad = other.clip_grad = shadow.clip_grad = 1.0  # the state's
    owners = everything  # the third stage was lost, too
    clipping.restored([mine], everything)
    assert clipping.follow([mine], owners) == () and shadow.clip_grad == 1.0
    clipping.write_again([mine], (0.5,))
    assert clipping.follow([mine], owners) == (), "written again is not written"
    assert [one.clip_grad for one in (mine, other, shadow)] == [0.5] * 3


def test_a_bound_set_before_the_first_step_reaches_the_other_stages_and_what_arrives_is_not_the_scripts() -> None:
    clipping = ClippingByHand()
    mine, other, arrived = (SimpleNamespace(clip_grad=1.0) for _ in range(3))
    clipping.leave([mine])
    mine.clip_grad = 0.5
    assert clipping.follow([mine], [replica(0, mine), replica(1, other)]) == (0.5,) and other.clip_grad == 0.5
    mine.clip_grad, arrived.clip_grad = 0.3, 0.4
    clipping.note(mine)
    assert clipping.follow([mine], [replica(0, mine), replica(2, arrived)]) == () and arrived.clip_grad == 0.4


def test_a_scale_that_was_set_once_is_set_again_and_an_override_too() -> None:
    def optimizer() -> Any:
        made = FP16_Optimizer.__new__(FP16_Optimizer)
        made.loss_scale_config = SimpleNamespace(cur_scale=8.0, cur_iter=3, use_grad_scaling=True)
        made.custom_loss_scaler, made.external_loss_scale = False, None
        return made

    scale, mine, other = ScaleByHand(), optimizer(), optimizer()
    scale.leave([mine])
    mine.loss_scale_config.cur_scale = 2.0
    written = scale.follow([mine], [mine, other])
    assert written == ({"cur_scale": 2.0},) and scale.follow([mine], [mine, other]) == (), "once"
    mine.override_loss_scale(0.25)
    written += scale.follow([mine], [mine, other])
    for one in (mine, other):  # the state's
        one.loss_scale_config.cur_scale, one.custom_loss_scaler, one.external_loss_scale = 8.0, False, None
    scale.leave([mine])
    assert scale.follow([mine], [mine, other]) == ()
    scale.write_again([mine], written)
    assert scale.follow([mine], [mine, other]) == (), "written again is not written"
    for one in (mine, other):
        assert (one.loss_scale_config.cur_scale, one.custom_loss_scaler, one.external_loss_scale) == (2.0, True, 0.25)


def test_a_worker_that_came_after_something_was_written_can_do_later_steps_only() -> None:
    for written in (Written(clip=(0.5,)), Written(scale=({"cur_scale": 2.0},)), Written(groups=((None, ()),))):
        history = StepHistory()
        history.begin_anew(3)
        for step in range(3, 7):
            if step == 4:
                history.note(written=written)
            history.done(step, loss=1.0)
        assert history.plain_from == 5
        assert [bool(its) for its in history.written_from(3)] == [False, True, False, False, False]


def test_tensors_on_the_root_count_for_what_the_history_takes() -> None:
    root, own = RootByHand(lambda _: None), Own()
    root.leave(own)
    own.factors = (torch.zeros(6), {"mask": torch.zeros(2)})
    history = StepHistory()
    history.note(written=Written(root=root.follow(own, [own])))
    assert history.kept_bytes == 32
