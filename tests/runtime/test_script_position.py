"""How a script that begins at step 0 comes to its job's step, without a job."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.checkpoint.beginning import Loaded
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition


class Following(CatchingUp):
    """Joins a job that is at step ``at``."""

    def __init__(self, *, at: int, began: int = 0, past: Any = None) -> None:
        self.log: list[str] = []
        writes = SimpleNamespace(
            written=lambda: (),
            go_back=lambda _: self.log.append("back"),
            come_back=lambda: self.log.append("come back"),
        )
        self.position = ScriptPosition(Phase.OUTSIDE)
        parts = ScriptParts(
            SimpleNamespace(session=SimpleNamespace(past=past)),  # type: ignore[arg-type]
            position=self.position,
            writes=writes,  # type: ignore[arg-type]
            feed=SimpleNamespace(),  # type: ignore[arg-type]
            batch=SimpleNamespace(adopt=lambda: self.log.append("batch")),  # type: ignore[arg-type]
            beginning=SimpleNamespace(),  # type: ignore[arg-type]
        )
        super().__init__(parts)
        self.at = at
        self.position.begin_at(began)

    def _take_part(self) -> None:
        self.log.append("join")
        self.position.reached = self.at

    @property
    def is_behind(self) -> bool:
        return not self.position.inside

    def _answer(self, call: int) -> Loaded:
        return f"load {call}", {}


@pytest.mark.parametrize("began", [0, 3])
def test_a_script_that_counts_by_itself_passes_the_jobs_steps_by_and_then_trains(began: int) -> None:
    past = SimpleNamespace(loss=lambda step: step / 8, evaluation=lambda step, number: step + number / 8)
    script = Following(at=5, began=began, past=past)
    losses = []
    while script.is_before_its_time():
        assert script.is_behind and script.position.phase is Phase.CATCHING_UP
        losses.append(script.past_loss())
    assert losses == [step / 8 for step in range(began, 5)]
    assert script.position.inside and script.log == ["join", "back", "come back"]


def test_a_script_that_goes_by_the_jobs_step_is_there_at_once_with_its_batch() -> None:
    script = Following(at=5)
    assert script.position.untouched
    script.enter(counts_by_itself=False)
    assert script.position.inside and not script.position.untouched
    assert script.log == ["join", "come back", "batch"]
    assert not script.is_before_its_time()


def test_a_script_that_counts_by_itself_and_comes_at_the_jobs_step_trains_at_once() -> None:
    script = Following(at=3, began=3)
    assert not script.is_before_its_time()
    assert script.position.inside and script.log == ["join", "come back"]


def test_evaluations_after_one_step_are_numbered() -> None:
    past = SimpleNamespace(loss=lambda _: 0.0, evaluation=lambda step, number: step + number / 8)
    script = Following(at=2, past=past)
    assert script.is_before_its_time()
    assert [script.past_evaluation() for _ in range(3)] == [0.0, 0.125, 0.25]
    script.past_loss()
    assert script.past_evaluation() == 1.0


def test_what_nobody_can_say_is_the_last_known_loss_and_no_number() -> None:
    def unknown(*_: int) -> float:
        raise CoordinatorUnavailable(endpoints=["memory"], tried_seconds=0.0, reason="off")

    script = Following(at=2, past=SimpleNamespace(loss=unknown, evaluation=unknown))
    script.position.loss = 0.5
    assert script.is_before_its_time()
    assert math.isnan(script.past_evaluation()) and script.past_loss() == 0.5


def test_loads_are_answered_in_order_and_nothing_is_noticed_inside() -> None:
    script = Following(at=2)
    assert [script.next_load() for _ in range(2)] == [("load 0", {}), ("load 1", {})]
    with pytest.raises(KeyError), script.position.unnoticed():
        assert script.position.inside
        raise KeyError
    assert script.position.untouched
