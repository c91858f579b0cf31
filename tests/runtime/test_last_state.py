"""A job that was stopped continues from where its script left the loop, whatever it did after that."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.checkpoint import last_state
from deepspeed_bamboo.runtime.checkpoint.last_state import LastState
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build

TRAINING = Training("stopped-1x2", 2, steps=6, faults=[])
STOPPED_IN, BEST_AFTER = 3, 1


def ask_to_stop(engine: Any) -> None:
    """Return once this worker has heard that the job is to end."""
    if engine.is_reporter:
        engine.session.coordinator.request_stop("asked to by a test")
    deadline = time.monotonic() + 60.0
    while engine.session.stop_reason is None:
        if time.monotonic() > deadline:
            raise TimeoutError("nothing was heard of the stop within 60 s")
        time.sleep(0.01)


def train_and_load_best(training: Training, own: str, kept: str | None, stops: bool) -> dict[str, Any]:
    """It lowers its rate after each step, and has its best checkpoint at the end, to evaluate it."""
    checkpoint = {} if kept is None else {"dir": kept}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses: dict[str, float] = {}
    while not engine.finished and engine.global_steps < training.steps:
        step = engine.global_steps
        if stops and step == STOPPED_IN:
            ask_to_stop(engine)
        losses[str(step)] = float(engine.train_batch(data))
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.8
        if step == BEST_AFTER:
            engine.save_checkpoint(own, tag="best")
    if stops:
        engine.load_checkpoint(own, tag="best")
    result = {"losses": losses, "digest": engine.state_digest(), "steps": engine.global_steps}
    engine.close()
    return result


def train_and_load_best_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One after the other."""
    return {name: train_and_load_best(**run) for name, run in runs.items()}


def test_a_stopped_job_continues_from_its_last_step_though_its_script_has_loaded_its_best_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept")

    def run(name: str, *, kept: str | None, stops: bool) -> dict[str, Any]:
        return {
            "training": dataclasses.replace(TRAINING, name=f"stopped-{name}"),
            "own": str(tmp_path / name),
            "kept": kept,
            "stops": stops,
        }

    runs = {
        "whole": run("whole", kept=None, stops=False),
        "stopped": run("stopped", kept=kept, stops=True),
        "again": run("again", kept=kept, stops=False),
    }
    result = jobs.run(train_and_load_best_all, world=2, runs=runs)
    expected, stopped, again = (result.common(name) for name in runs)
    assert (stopped["steps"], list(stopped["losses"])) == (BEST_AFTER + 1, ["0", "1", "2", "3"]), result.transcript()
    assert again["losses"] == {step: expected["losses"][step] for step in ("4", "5")}, result.transcript()
    assert (again["digest"], again["steps"]) == (expected["digest"], TRAINING.steps)


class Kept:
    """What LastState needs of a worker and its checkpoints: ``log`` has what it does, others say ``others``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others: bool = False) -> None:
        self.log: list[str] = []
        self.version = 0
        worker: Any = SimpleNamespace(
            host=SimpleNamespace(owned={Coordinate(0, 1): None}),
            agree_on=lambda kind, value: {"w0": value(), "w1": others},
        )
        monkeypatch.setattr(last_state, "touched", lambda _: (self.version, ""))
        monkeypatch.setattr(last_state, "tell", lambda _, text: self.log.append(text))
        self.state = LastState(worker, SimpleNamespace(finish=self.finish))  # type: ignore[arg-type]

    def finish(self) -> None:
        assert self.state.ending
        self.log.append("kept")


@pytest.mark.parametrize(
    ("asks", "others", "before"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_it_is_kept_once_before_a_load_that_follows_the_loop(
    monkeypatch: pytest.MonkeyPatch, asks: bool, others: bool, before: bool
) -> None:
    """A load in the loop, by which a script goes back, is none of these. Whoever has left it, all keep."""
    kept = Kept(monkeypatch, others=others)
    assert not kept.state.note(False)
    kept.state.keep_before_load(stopped=False)
    assert kept.log == []
    if asks:
        assert kept.state.note(True)
    kept.state.keep_before_load(stopped=True)
    assert kept.log == ["kept"] * before
    kept.version += before  # what was loaded
    kept.state.keep_before_load(stopped=True)
    kept.state.keep_at_close()
    assert kept.log == ["kept"]


def test_weights_that_the_script_changes_itself_after_its_loop_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    asking = threading.Thread(target=kept.state.note, args=(True,))  # another thread's question says nothing
    asking.start()
    asking.join()
    kept.version += 1
    assert kept.state.note(True) and kept.state.note(True)
    kept.version += 1
    assert kept.state.note(True)
    kept.state.keep_at_close()
    assert len(kept.log) == 2 and "has changed weights or optimizer state of 0.1, and this is kept" in kept.log[0]


def test_a_job_without_checkpoints_keeps_nothing() -> None:
    nobody: Any = None
    state = LastState(nobody, None)
    assert state.note(True)
    state.keep_before_load(stopped=True)
    state.keep_at_close()
    assert not state.ending
