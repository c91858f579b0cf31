"""Scripts that go back in the middle, by a checkpoint of their own, and count their calls by themselves.

Started again, or on a late worker, they have the losses, steps and loads that they had.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, wait_for_joiners
from tests.runtime.test_losses import kill

TRAINING = Training("back-1x2", 2, steps=12, faults=[])  # steps: calls of train_batch
SAVED_AFTER, BACK_AFTER = 3, 6


def roll_back(
    training: Training, own: str, kept: str | None = None, waits: dict[str, int] | None = None, evaluates: bool = False
) -> dict[str, Any]:
    """After call BACK_AFTER it loads what it has saved after call SAVED_AFTER; its data go on."""
    checkpoint = {"dir": kept, "interval_minutes": 1e-9} if kept is not None else {}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    held_out = models.micro_batches(models.vectors, pipeline=0, first_step=90, count=training.micro_batches)
    said: list[Any] = []
    for call in range(training.steps):
        if not engine.catching_up:
            wait_for_joiners(engine, (waits or {}).get(str(call), 0))
        said.append([float(engine.train_batch(data)), engine.global_steps])
        # What all do together between two steps. A late worker is alone on its way.
        said.append(max(engine.agree_on("call", lambda done=call: done).values()))
        assert bool(engine.whole_state_dict()) == engine.is_reporter
        if call == SAVED_AFTER:
            engine.save_checkpoint(own, tag="good", client_state={"k": call})
        if call == BACK_AFTER:
            _, state = engine.load_checkpoint(own, tag="good")
            said.append([state["k"], engine.global_steps])
        if evaluates and call % 3 == 0:
            said.append(float(engine.eval_batch(held_out)))
    result = {"said": said, "digest": engine.state_digest(), "steps": engine.global_steps}
    engine.close()
    return result


def roll_back_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One after the other."""
    return {name: roll_back(**run) for name, run in runs.items()}


def test_a_script_that_has_gone_back_continues_with_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """It ends in front of that, after it, and some calls later."""

    def run(name: str, calls: int, *, kept: bool) -> dict[str, Any]:
        training = dataclasses.replace(TRAINING, name=f"back-{name}-{calls}", steps=calls)
        folders = {"own": str(tmp_path / f"own-{name}"), "kept": str(tmp_path / f"kept-{name}") if kept else None}
        return {"training": training, "evaluates": True, **folders}

    ends = (BACK_AFTER, BACK_AFTER + 1, BACK_AFTER + 3)
    runs = {"whole": run("whole", 12, kept=False)}
    for end in ends:
        runs |= {f"short{end}": run(str(end), end, kept=True), f"again{end}": run(str(end), 12, kept=True)}
    result = jobs.run(roll_back_all, world=2, runs=runs)
    expected = result.common("whole")
    assert expected["steps"] == 9 and [SAVED_AFTER, SAVED_AFTER + 1] in expected["said"]
    for end in ends:
        assert result.common(f"again{end}") == expected, result.transcript()
    told = "".join(result.outputs.values())
    assert "train_batch returns at once for steps 0 to 5, with the losses that they had" in told
    assert "train_batch returns at once for the first 9 calls (it loaded an earlier step between them)" in told


@pytest.mark.parametrize(
    "joins_at", [BACK_AFTER - 1, BACK_AFTER, BACK_AFTER + 1, pytest.param(9, marks=pytest.mark.sweep)]
)
def test_a_late_worker_of_a_script_that_goes_back_does_what_the_others_did(
    jobs: Jobs, tmp_path: Path, joins_at: int
) -> None:
    plain = dataclasses.replace(TRAINING, name=f"plain-back-{joins_at}")
    expected = jobs.run(roll_back, world=2, training=plain, own=str(tmp_path / "plain"))
    lossy = dataclasses.replace(TRAINING, faults=[kill(2, 0, 0, "forward", 1)], name=f"late-back-{joins_at}")
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {str(joins_at): 1}}
    result = jobs.run(roll_back, world=2, training=lossy, own=str(tmp_path / "lossy"), **more)
    assert result.survivors == [1, 2], result.transcript()
    assert result.common("digest") == expected.common("digest"), result.transcript()
    assert result.common("said") == expected.common("said"), result.transcript()
    assert result.common("steps") == 9


def roll_back_and_continue(
    training: Training, own: str, kept: str | None = None, waits: dict[str, int] | None = None
) -> dict[str, Any]:
    """It begins with its newest checkpoint, of k = 4, and seeks its data; once, at k = 7, it goes back to that one."""
    checkpoint = {"dir": kept, "interval_minutes": 1e-9} if kept is not None else {}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    k, gone_back = 0, False
    if Path(own, "latest").exists():
        _, state = engine.load_checkpoint(own)
        k = state["k"]
    data = models.micro_batches(models.vectors, pipeline=0, first_step=k, count=training.micro_batches)
    said: list[Any] = []
    while not gone_back or k < training.steps:
        if gone_back and not engine.catching_up:
            wait_for_joiners(engine, (waits or {}).get(str(k), 0))
        said.append([k, float(engine.train_batch(data)), engine.global_steps])
        k += 1
        if k == SAVED_AFTER + 1:
            engine.save_checkpoint(own, client_state={"k": k})
        if k == BACK_AFTER + 1 and not gone_back:
            _, state = engine.load_checkpoint(own)
            k, gone_back = state["k"], True
            assert state.keys().isdisjoint({"bamboo", "bamboo_call"})
    result = {"said": said, "digest": engine.state_digest(), "steps": engine.global_steps}
    engine.close()
    return result


def roll_back_and_continue_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One after the other."""
    return {name: roll_back_and_continue(**run) for name, run in runs.items()}


def test_a_script_that_has_gone_back_and_begins_with_its_own_checkpoint_has_the_data_of_then(
    jobs: Jobs, tmp_path: Path
) -> None:
    """It was saved before call 4; step 4 was trained once more in call 7. The job ends after call 8."""

    def run(name: str, steps: int, *, kept: bool) -> dict[str, Any]:
        training = dataclasses.replace(TRAINING, name=f"back-own-{name}-{steps}", steps=steps)
        return {"training": training, "own": str(tmp_path / name), "kept": str(tmp_path / "kept") if kept else None}

    runs = {"whole": run("a", 8, kept=False), "short": run("b", 6, kept=True), "again": run("b", 8, kept=True)}
    result = jobs.run(roll_back_and_continue_all, world=2, runs=runs)
    expected, again = result.common("whole"), result.common("again")
    assert [k for k, *_ in expected["said"]] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert again["said"] == expected["said"][SAVED_AFTER + 1 :], result.transcript()
    assert (again["digest"], again["steps"]) == (expected["digest"], 8)


@pytest.mark.sweep
def test_a_late_worker_that_begins_with_what_the_script_saved_before_it_went_back_does_what_the_others_did(
    jobs: Jobs, tmp_path: Path
) -> None:
    training = dataclasses.replace(TRAINING, name="plain-back-own", steps=8)
    expected = jobs.run(roll_back_and_continue, world=2, training=training, own=str(tmp_path / "plain"))
    lossy = dataclasses.replace(training, faults=[kill(5, 0, 0, "forward", 1)], name="late-back-own")
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {"5": 1}}
    result = jobs.run(roll_back_and_continue, world=2, training=lossy, own=str(tmp_path / "lossy"), **more)
    assert result.survivors == [1, 2], result.transcript()
    assert result.common("digest") == expected.common("digest"), result.transcript()
    assert result.values[1]["said"] == expected.common("said")
    assert result.values[2]["said"] == expected.common("said")[SAVED_AFTER + 1 :]
