"""What replaces parts of DeepSpeed's: only where it should, and for no longer than it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.utils import mixed_precision_linkage, safe_set_full_fp32_param, safe_set_full_optimizer_state
from deepspeed.utils.timer import ThroughputTimer

from deepspeed_bamboo.runtime.stock.gradients import scale_state
from deepspeed_bamboo.runtime.stock.patches.entry_points import engine_class, initialize_function
from deepspeed_bamboo.runtime.stock.patches.full_values import count_full_values
from deepspeed_bamboo.runtime.stock.patches.shared_memory_op import leave_out_shared_memory_op
from deepspeed_bamboo.runtime.stock.patches.throughput_timer import let_the_device_run
from deepspeed_bamboo.runtime.stock.scale_by_hand import ScaleByHand
from deepspeed_bamboo.runtime.stock.state_versions import versions_of


def test_entry_points_are_stocks_again_after_an_error() -> None:
    stock = deepspeed.PipelineEngine, deepspeed.initialize
    with pytest.raises(ZeroDivisionError), engine_class(dict), initialize_function(list):
        assert (deepspeed.PipelineEngine, deepspeed.initialize) == (dict, list)
        raise ZeroDivisionError
    assert (deepspeed.PipelineEngine, deepspeed.initialize) == stock


@pytest.mark.parametrize(
    ("known", "expected"),
    [({"deepspeed_shm_comm": True, "fused_adam": True}, {"deepspeed_shm_comm": False, "fused_adam": True}), ({}, {})],
)
def test_the_shared_memory_op_alone_is_left_out(
    known: dict[str, bool], expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", known, raising=False)
    leave_out_shared_memory_op()
    assert known == expected


def test_the_timer_waits_no_more_and_other_settings_stay() -> None:
    from deepspeed.utils.config import get_timers_config

    settings = get_timers_config({"timers": {"throughput": {"synchronized": True}}})
    engine: Any = SimpleNamespace(tput_timer=ThroughputTimer(settings, batch_size=4))
    let_the_device_run(engine)
    assert engine.tput_timer.config == settings.model_copy(update={"synchronized": False})
    kept = engine.tput_timer.config
    let_the_device_run(engine)
    assert engine.tput_timer.config is kept


def test_a_timer_without_that_setting_is_left_alone() -> None:
    settings = SimpleNamespace(enabled=True)
    engine: Any = SimpleNamespace(tput_timer=SimpleNamespace(config=settings))
    let_the_device_run(engine)
    assert engine.tput_timer.config is settings


def test_what_is_written_through_data_counts_for_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By DeepSpeed's ``safe_set_full_*``, as a script scales its fp32 masters or resets moments."""
    monkeypatch.setattr(mixed_precision_linkage, "set_full_hp_param", mixed_precision_linkage.set_full_hp_param)
    count_full_values()
    counting = mixed_precision_linkage.set_full_hp_param
    count_full_values()
    assert mixed_precision_linkage.set_full_hp_param is counting, "once is enough"
    weight, master = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(6))
    moments = {"exp_avg": torch.ones(6)}
    mixed_precision_linkage.link_hp_params([weight], master, {}, {}, False, 0, 0, 6, None)
    mixed_precision_linkage.lazy_init_hp_params_optimizer_state([weight], master, {master: moments})
    optimizer: Any = BF16_Optimizer.__new__(BF16_Optimizer)
    optimizer.fp32_groups_flat_partition, optimizer.clip_grad = [master], 1.0
    basic = SimpleNamespace(state={master: moments})
    replica: Any = SimpleNamespace(
        module=torch.nn.ParameterList([weight]),
        attributes={"optimizer": optimizer, "basic_optimizer": basic, "lr_scheduler": None},
    )
    seen = [versions_of(replica)]
    safe_set_full_fp32_param(weight, torch.full((4,), 2.0))
    seen.append(versions_of(replica))
    safe_set_full_optimizer_state(weight, torch.zeros(4), "exp_avg")
    seen.append(versions_of(replica))
    with torch.no_grad():
        master.mul_(2)
    seen.append(versions_of(replica))
    assert len(set(seen)) == len(seen), seen
    assert versions_of(replica) == seen[-1]
    assert master.tolist() == [4.0] * 4 + [2.0] * 2 and moments["exp_avg"].tolist() == [0.0] * 4 + [1.0] * 2


def test_a_scale_by_hand_reaches_all_stages_and_what_steps_change_does_not() -> None:
    def optimizer(scale: float) -> Any:
        made = FP16_Optimizer.__new__(FP16_Optimizer)
        made.loss_scale_config = SimpleNamespace(cur_scale=scale, cur_iter=3, use_grad_scaling=True)
        made.custom_loss_scaler, made.external_loss_scale = False, None
        return made

    scale, own, shadow = ScaleByHand(), optimizer(8.0), optimizer(8.0)
    scale.follow([own], [own, shadow])
    scale.leave([own])
    own.loss_scale_config.cur_scale = 2.0
    scale.follow([own], [own, shadow])
    assert scale_state(shadow)["cur_scale"] == 2.0
    own.loss_scale_config.cur_iter, own.loss_scale_config.cur_scale = 4, 1.0  # by a step
    scale.leave([own])
    scale.follow([own], [own, shadow])
    assert scale_state(shadow) == {**scale_state(own), "cur_iter": 3, "cur_scale": 2.0}
    own.override_loss_scale(16.0)
    scale.follow([own], [own, shadow])
    assert (shadow.custom_loss_scaler, shadow.external_loss_scale) == (True, 16.0)
    assert not scale_state(torch.optim.SGD([torch.ones(1)], lr=0.1))
