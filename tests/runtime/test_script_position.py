"""How a script that begins at step 0 comes to its job's step, without a job."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime import catching_up
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.catching_up_engine import CatchingUpEngine
from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.late_worker import LateWorker
from deepspeed_bamboo.runtime.restored_job import RestoredJob
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition


def parts(log: list[str], past: Any = None) -> ScriptParts:
    """Of a worker that is where its job is; what its ``writes`` and ``batch`` are asked for is in ``log``."""
    writes = SimpleNamespace(
        written=lambda: (), go_back=lambda _: log.append("back"), come_back=lambda: log.append("come back")
    )
    past = past or SimpleNamespace(loss=lambda step: 0.0, evaluation=lambda step, number: 0.0)
    worker: Any = SimpleNamespace(
        session=SimpleNamespace(past=past),
        is_reporter=False,
        host=SimpleNamespace(owned={}),
        agree_on=lambda what, decide: {"this one": decide()},
    )
    return ScriptParts(
        worker,
        position=ScriptPosition(),
        writes=writes,  # type: ignore[arg-type]
        feed=SimpleNamespace(data=SimpleNamespace(covers_every_pipeline=True)),  # type: ignore[arg-type]
        batch=SimpleNamespace(adopt=lambda: log.append("batch")),  # type: ignore[arg-type]
        beginning=Beginning(),
    )


class Following(CatchingUp):
    """Joins a job that is at step ``at``."""

    def __init__(self, *, at: int, began: int = 0, past: Any = None) -> None:
        self.log: list[str] = []
        made = parts(self.log, past=past)
        self.position = made.position
        self.position.phase = Phase.OUTSIDE
        super().__init__(made)
        self.at = at
        self.position.begin_at(began)

    def _take_part(self) -> None:
        self.log.append("join")
        self.position.reached = self.at

    @property
    def is_behind(self) -> bool:
        return not self.position.inside

    def _answer(self, call: int, asked: Asked) -> Loaded:
        return f"load {call} of {asked.folder}", {}


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


@pytest.mark.parametrize("ended", [False, True])
def test_in_a_job_that_continues_what_follows_the_last_step_passed_by_is_done(ended: bool) -> None:
    """But where the script had ended then: the checkpoint has what it did after that step."""
    script = RestoredJob(parts(log := []), checkpoints=None, files=None, stored=None, seeded=None)  # type: ignore[arg-type]
    script._ended, script.answers = ended, True
    script._position.phase, script._position.reached = Phase.OUTSIDE, 2
    passed = []
    while script.is_before_its_time():
        assert not script.calls_alone() and script.is_on_its_way
        script.past_loss()
        passed.append((script.is_behind, script.answers))
    assert passed == [(True, True), (ended, ended)]
    assert log == ["back", "come back"] and script._position.only_passed_by


def test_a_late_worker_says_once_which_collective_it_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(catching_up, "tell", lambda _, text: told.append(text))
    script = LateWorker(parts([]), join=lambda _: None, files=SimpleNamespace())  # type: ignore[arg-type]
    assert not script.calls_alone() and not script.is_on_its_way, "it is where the job is"
    script._position.phase = Phase.OUTSIDE
    for name, said in (("barrier", 0), ("all_reduce", 1), ("all_gather_object", 1)):
        exec(f"def {name}(call): return call()", spoken := {"__name__": "torch.distributed.distributed_c10d"})
        assert spoken[name](script.calls_alone) and len(told) == said
    assert f"its script calls all_reduce ({__file__}:" in told[0] and "engine.catching_up" in told[0]
    assert not script.is_on_its_way, "it may go by the job's step"
    script._position.calls = 1
    assert script.is_on_its_way


def test_what_a_late_worker_does_with_the_others_before_it_is_there_is_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but a step of the job makes it one of the others: they train, and do not wait for it elsewhere."""
    told: list[str] = []
    monkeypatch.setattr(catching_up, "tell", lambda _, text: told.append(text))
    made = parts([])
    late = LateWorker(made, join=lambda _: None, files=SimpleNamespace())  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(_catching_up=late, worker=SimpleNamespace(me="w7"))
    for phase, calls in ((Phase.OUTSIDE, 0), (Phase.OUTSIDE, 2), (Phase.CATCHING_UP, 3)):
        made.position.phase, made.position.calls = phase, calls
        assert CatchingUpEngine.agree_on(engine, "norm", lambda at=calls: at) == {"w7": calls}
        assert CatchingUpEngine.whole_state_dict(engine) == {} and made.position.phase is phase
    made.position.phase = Phase.INSIDE
    assert not late.is_alone
    assert len(told) == 1 and f"its script calls engine.agree_on ({__file__}:" in told[0]


def test_loads_are_answered_in_order_and_nothing_is_noticed_inside() -> None:
    script = Following(at=2)
    asked = Asked("its", None, whole=True, load=lambda: (None, None))
    assert [script.next_load(asked) for _ in range(2)] == [("load 0 of its", {}), ("load 1 of its", {})]
    with pytest.raises(KeyError), script.position.unnoticed():
        assert script.position.inside
        raise KeyError
    assert script.position.untouched


def test_at_the_end_of_what_the_job_did_the_script_saves_what_there_is_now() -> None:
    """A job that was complete may be started again for its export; before its last step weights are of later."""
    position = ScriptPosition(calls=2, reached=3)
    engine: Any = SimpleNamespace(_made_catching_up=SimpleNamespace(is_behind=True), position=position)
    is_behind: Any = CatchingUpEngine.is_behind
    assert is_behind.fget(engine) is True
    position.calls = 3
    assert is_behind.fget(engine) is False
