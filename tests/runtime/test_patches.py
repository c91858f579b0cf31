"""What replaces parts of DeepSpeed's: only where it should, and for no longer than it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.utils.timer import ThroughputTimer

from deepspeed_bamboo.runtime.stock.patches.entry_points import engine_class, initialize_function
from deepspeed_bamboo.runtime.stock.patches.shared_memory_op import leave_out_shared_memory_op
from deepspeed_bamboo.runtime.stock.patches.throughput_timer import let_the_device_run


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
