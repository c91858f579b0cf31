"""What ``load_checkpoint`` returns to a script whose job is further than what it loads, without a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.runtime import late_worker, restored_job
from deepspeed_bamboo.runtime.catching_up import CatchingUp, ScriptParts
from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning, Loaded
from deepspeed_bamboo.runtime.checkpoint.script_resume import Asked, Resume
from deepspeed_bamboo.runtime.late_worker import LateWorker
from deepspeed_bamboo.runtime.restored_job import RestoredJob
from deepspeed_bamboo.runtime.script_position import Phase, ScriptPosition

STEP = 700
OLD = "pretrained/global_step50000/mp_rank_00_model_states.pt"
Start = tuple[CatchingUp, Beginning, list[Any]]


def asked(folder: str, tag: str | None = None, **options: Any) -> Asked:
    return Asked.of(folder, tag, (), options, lambda: (None, None))


def noted(*loads: tuple[Asked, Loaded], first: int = 0) -> Beginning:
    """Of a job whose script has loaded so, in a checkpoint of which it is read again."""
    beginning, again = Beginning(), Beginning()
    for at, (what, loaded) in enumerate(loads):
        beginning.note(loaded, before=first if at else 0, after=first, wanted=what.wanted)
    again.take(beginning.to_json())
    return again


def start(kind: str, beginning: Beginning, saved: dict[str, Resume], monkeypatch: pytest.MonkeyPatch) -> Start:
    """A script that begins again in a job of step STEP; ``saved``: by folder what is there now.

    The last value gets where its data begin.
    """
    for module, name in ((restored_job, "tell_once"), (late_worker, "tell")):
        monkeypatch.setattr(module, name, lambda _, text: None)
    begins: list[Any] = []
    coordinator = SimpleNamespace(status=lambda: {"step": STEP - 1}, facts=lambda: {"began": beginning.to_json()})
    worker: Any = SimpleNamespace(
        step=STEP, session=SimpleNamespace(coordinator=coordinator), host=SimpleNamespace(owned={}), me="w9"
    )
    feed: Any = SimpleNamespace(
        data=SimpleNamespace(start_at=lambda step, used: begins.append((step, used)), covers_every_pipeline=True),
        used=lambda since: beginning.call_of(STEP) - since,
    )
    position = ScriptPosition(phase=Phase.OUTSIDE, reached=beginning.call_of(STEP))
    nothing: Any = SimpleNamespace(
        written=lambda: (), go_back=lambda _: None, come_back=lambda: None, adopt=lambda: None
    )
    parts = ScriptParts(worker, position=position, writes=nothing, feed=feed, batch=nothing, beginning=beginning)
    files: Any = SimpleNamespace(resume=lambda folder, tag, together: saved.get(folder), publish_beginning=lambda: None)
    position.begin_at(beginning.first)
    made: CatchingUp
    if kind == "late":
        made = LateWorker(parts, join=lambda known: known(), files=files)
    else:
        made = RestoredJob(parts, checkpoints=None, files=files, stored=None, seeded=lambda _: None)  # type: ignore[arg-type]
    return made, beginning, begins


@pytest.mark.parametrize("kind", ["late", "restored"])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (asked("pretrained", load_module_only=True), asked("own")),
        (asked("pretrained"), asked("own")),
        (asked("own", "pretrained"), asked("own", "step600")),
        (asked("own", load_module_only=True), asked("own")),
    ],
)
def test_a_script_that_loads_what_it_has_saved_where_it_began_with_something_else_gets_that(
    monkeypatch: pytest.MonkeyPatch, kind: str, before: Asked, now: Asked
) -> None:
    """As fine-tuning scripts do: its own newest checkpoint if there is one, else pretrained weights."""
    job = noted((before, (OLD, {"step": 50000})))
    own = Resume("own/step600/mp_rank_00_model_states.pt", 600, {"step": 600})
    script, beginning, begins = start(kind, job, {"own": own}, monkeypatch)
    assert script.next_load(now) == (own.path, {"step": 600})
    assert script.step == 600
    if kind == "late":
        script.enter(counts_by_itself=True)
    else:
        again = noted()
        again.take(beginning.to_json())
        assert again.first == 600 and again.returned(0, at=600, wanted=now.wanted) == (own.path, {"step": 600})
        assert again.returned(1, at=600) is None, "what it began with does not count any more"
    assert begins == [(STEP, 100)]


@pytest.mark.parametrize("kind", ["late", "restored"])
def test_a_script_that_has_asked_for_the_jobs_step_gets_what_it_has_saved_too(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It goes by that step, so nothing begins elsewhere."""
    job = noted((asked("pretrained"), (OLD, {"step": 50000})))
    own = Resume("own/step600", 600, {"step": 600})
    script, beginning, begins = start(kind, job, {"own": own}, monkeypatch)
    script.enter(counts_by_itself=False)
    before = list(begins)
    assert script.next_load(asked("own")) == ("own/step600", {"step": 600})
    assert (script.step, beginning.first, begins) == (0, 0, before)


@pytest.mark.parametrize("kind", ["late", "restored"])
def test_a_script_that_loads_what_it_began_with_gets_what_it_got(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Weights alone from wherever they are this time; and what a checkpoint of an earlier version doesn't know."""
    newer = {"own": Resume("own/x", 600, {"step": 600})}
    weights = asked("pretrained", load_module_only=True)
    job = noted((asked("own"), ("own/a", {"step": 4})), (weights, (OLD, {})), first=4)
    script, *_ = start(kind, job, newer, monkeypatch)
    assert script.next_load(asked("./own/")) == ("own/a", {"step": 4})
    assert script.next_load(asked("/tmp/17/pretrained", load_module_only=True)) == (OLD, {})
    nothing, *_ = start(kind, noted((asked("own"), (None, None))), newer, monkeypatch)
    assert nothing.next_load(asked("own")) == (None, None)
    older = Beginning()
    older.take({"step": 4, "loads": [[4, load.returned] for load in job.loads], "turns": []})
    script, *_ = start(kind, older, newer, monkeypatch)
    assert script.next_load(asked("elsewhere")) == ("own/a", {"step": 4})


@pytest.mark.parametrize("kind", ["late", "restored"])
def test_a_folder_in_which_nothing_is_gives_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    script, beginning, _ = start(kind, noted((asked("pretrained"), (OLD, {}))), {}, monkeypatch)
    assert script.next_load(asked("own")) == (None, None) and script.step == beginning.first == 0


@pytest.mark.parametrize("kind", ["late", "restored"])
def test_a_script_that_has_gone_back_begins_at_the_call_at_which_it_saved(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its job went back to step 400 before call 600; the checkpoint of step 400 was saved before call 400."""
    job = noted((asked("own"), (None, None)))
    job.note(("own/step400", {}), before=600, after=400, wanted=asked("own").wanted)
    own = Resume("own/step400", 400, {"step": 400}, call=400)
    script, _, begins = start(kind, job, {"new": own}, monkeypatch)
    assert script.next_load(asked("new")) == ("own/step400", {"step": 400}) and script.step == 400
    if kind == "late":
        script.enter(counts_by_itself=True)
    assert begins == [(STEP, 500)]  # calls 400 to 899
