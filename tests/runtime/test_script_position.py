"""How a script that begins at step 0 comes to its job's step, without a job."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime import catching_up
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.catching_up_engine import CatchingUpEngine
from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked
from deepspeed_bamboo.runtime.job.past_results import PastResults
from deepspeed_bamboo.runtime.late_worker import LateWorker
from deepspeed_bamboo.runtime.restored_job import RestoredJob
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition


def parts(log: list[str], past: Any = None) -> ScriptParts:
    """Of a worker that is where its job is; what its ``writes`` and ``batch`` are asked for is in ``log``."""
    writes = SimpleNamespace(
        written=lambda: (),
        go_back=lambda _: log.append("back"),
        come_back=lambda: log.append("come back"),
        come_back_beyond=lambda _, sure: log.append(f"come back, sure: {sure}") or [],
        by_script_alone=True,
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


def test_what_nobody_can_say_is_the_last_known_loss_and_no_number_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(catching_up, "tell", lambda _, text: told.append(text))

    def unknown(*_: int) -> float:
        raise CoordinatorUnavailable(endpoints=["memory"], tried_seconds=0.0, reason="off")

    script = Following(at=2, past=SimpleNamespace(loss=unknown, evaluation=unknown))
    script.position.loss = 0.5
    assert script.is_before_its_time()
    assert math.isnan(script.past_evaluation()) and script.past_loss() == 0.5
    assert math.isnan(script.past_evaluation()) and script.past_loss() == 0.5
    assert ["eval_batch returns not a number" in text for text in told] == [True, False], told


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
    assert log == ["back", "come back, sure: True" if ended else "come back"] and script._position.only_passed_by


@pytest.mark.parametrize("kind", ["evaluation", "save"])
def test_after_the_last_step_what_the_job_did_before_is_passed_by_and_what_is_new_is_done(kind: str) -> None:
    made = parts(log := [], past=PastResults(SimpleNamespace(past=lambda _: None)))  # type: ignore[arg-type]
    for loss in (0.5, 0.25):
        made.worker.session.past.note_evaluation(1, loss)
    script = RestoredJob(made, checkpoints=None, files=None, stored=None, seeded=None)  # type: ignore[arg-type]
    script._saves, script._restored = 2, "there"
    made.worker.step, made.position.phase, made.position.reached = 1, Phase.OUTSIDE, 1
    made.worker.session.past.note_loss(0, 4.0)
    assert script.is_before_its_time() and script.past_loss() == 4.0
    passed = []
    for _ in range(3):
        by = script.passes_save_by("own", None) if kind == "save" else script.passes_evaluation_by()
        passed.append(by and (kind == "save" or script.past_evaluation()))
    assert passed == ([True, True, False] if kind == "save" else [0.5, 0.25, False])
    assert made.position.inside and log == ["back", "come back, sure: True"] and not script.is_before_its_time()


def test_in_a_job_that_continues_what_comes_before_the_first_step_is_of_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setattr(catching_up, "tell", lambda _, text: told.append(text))
    made = parts([], past=PastResults(SimpleNamespace(past=lambda _: None)))  # type: ignore[arg-type]
    made.worker.session.past.note_evaluation(0, 0.5)
    script = RestoredJob(made, checkpoints=None, files=None, stored=None, seeded=None)  # type: ignore[arg-type]
    made.worker.step, made.position.phase, made.position.reached = 6, Phase.OUTSIDE, 6
    (tmp_path / "init").mkdir()
    assert not script.passes_evaluation_by() and not script.passes_save_by(tmp_path, "init"), "the job begins"
    script._restored = "there"
    assert script.passes_evaluation_by() and script.past_evaluation() == 0.5
    assert not script.passes_evaluation_by(), "it did one"
    assert [script.passes_save_by(tmp_path, tag) for tag in ("init", "other", None)] == [True, False, False]
    assert [text.split()[0] for text in told] == ["eval_batch", "save_checkpoint"] and made.position.untouched


@pytest.mark.parametrize("passed", [1, 2, 3])
def test_a_late_worker_that_evaluates_where_the_others_are_joins_and_has_what_they_had(passed: int) -> None:
    """They publish an evaluation with the step after it; until then nobody but they know it."""
    known: dict[tuple[int, int], float] = {}
    past = SimpleNamespace(loss=lambda call: call / 8, evaluation=lambda call, number: known.get((call, number)))
    made = parts(log := [], past=past)
    status = {"step": 1, "loss": 0.5}
    made.worker.session.coordinator = SimpleNamespace(status=lambda: status, facts=lambda: {})
    made.worker.step = 3
    made.feed.data.start_at = lambda *_, **__: None
    made.feed.used = lambda **_: 0  # type: ignore[method-assign]

    def join(data: Any) -> None:
        known.update({(passed, 0): 0.25, (passed, 1): 0.75})
        data()

    late = LateWorker(made, join=join, files=SimpleNamespace())  # type: ignore[arg-type]
    made.position.phase, made.position.calls, made.position.reached = Phase.OUTSIDE, passed, passed
    assert [late.past_evaluation() for _ in range(2)] == [0.25, 0.75]
    assert late.is_behind and made.position.phase is Phase.CATCHING_UP and log[-1] == "back"
    while late.is_before_its_time():
        late.past_loss()
    assert made.position.calls == 3 and log[-2:] == ["back", "come back"]


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
