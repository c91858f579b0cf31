"""Scripts that load a checkpoint of their own first: started again, or on a late worker, they use the same data."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, train_and_save, wait_for_joiners
from tests.runtime.test_losses import kill

TRAINING = Training("own-1x2", 2, steps=8, faults=[])
SAVED_AT = 3


def resume(
    training: Training,
    own: str,
    kept: str | None = None,
    seeks: bool = False,
    by_count: bool = False,
    waits: dict[str, int] | None = None,
    masks: bool = False,
    grows: dict[str, int] | None = None,
) -> dict[str, Any]:
    """A script that goes on from the newest checkpoint in ``own``; ``kept``: where the plugin keeps its own.

    ``seeks``: it looks in the client state where its data begin; otherwise they begin anew. ``by_count``: it counts
    its steps from there itself. ``masks``: its function for batches draws. ``grows``: by step, samples of a batch.
    """
    checkpoint = {"dir": kept, "interval_minutes": 1e-9} if kept is not None else {}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    path, state = engine.load_checkpoint(own)
    first = 0 if path is None else state["seen"]
    data_step = first if seeks else 0
    data = models.micro_batches(models.vectors, pipeline=0, first_step=data_step, count=training.micro_batches)
    losses: dict[str, float] = {}
    if masks:
        engine.set_batch_fn(masking(torch.Generator().manual_seed(5)))
    for step in range(first, training.steps) if by_count else iter(lambda: engine.global_steps, training.steps):
        wait_for_joiners(engine, (waits or {}).get(str(step), 0))
        if str(step) in (grows or {}):
            engine.set_train_batch_size(grows[str(step)])  # type: ignore[index]
        losses[str(step)] = float(engine.train_batch(data))
    hosted = [str(coordinate) for coordinate in engine.placement.hosted_by(engine.session.worker)]
    result = {
        "losses": losses,
        "digest": engine.state_digest(),
        "hosted": hosted,
        "loaded": [path and Path(path).parent.name, first],
    }
    engine.close()
    return result


def masking(generator: torch.Generator) -> Callable[[Any], Any]:
    """Drops some of each sample, others in each micro-batch."""
    return lambda batch: (batch[0] * (torch.rand(batch[0].shape, generator=generator) < 0.8), batch[1])


def resume_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several, one after the other; results by name, without what each worker hosts."""
    return {name: {**resume(**run), "hosted": []} for name, run in runs.items()}


@pytest.fixture(scope="module")
def own(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script's own checkpoint."""
    folder = str(tmp_path_factory.mktemp("own"))
    training = dataclasses.replace(TRAINING, name="saves", steps=SAVED_AT + 1)
    jobs.run(train_and_save, world=2, training=training, folder=folder, save_at=SAVED_AT)
    return folder


def test_a_job_that_continues_trains_on_the_data_that_it_would_have_had(jobs: Jobs, tmp_path: Path, own: str) -> None:
    """Whether its iterator begins anew, or where the client state says; it ends at step 6, and then goes on."""
    kinds = {"anew": {"by_count": True}, "seeks": {"seeks": True}}
    short = dataclasses.replace(TRAINING, steps=6)

    def runs(training: Training, **more: Any) -> dict[str, dict[str, Any]]:
        made = {}
        for kind, options in kinds.items():
            kept = {"kept": str(tmp_path / kind)} if more else {}
            name = f"{kind}-{training.steps}-{len(more)}"
            made[kind] = {"training": dataclasses.replace(training, name=name), "own": own, **options, **kept}
        return made

    whole = jobs.run(resume_all, world=2, runs=runs(TRAINING))
    jobs.run(resume_all, world=2, runs=runs(short, kept=True))
    again = jobs.run(resume_all, world=2, runs=runs(TRAINING, kept=True))
    expected = {kind: whole.common(kind)["losses"] for kind in kinds}
    assert expected["anew"] != expected["seeks"]
    anew, seeks = again.common("anew"), again.common("seeks")
    assert seeks["losses"] == {step: expected["seeks"][step] for step in ("6", "7")}, again.transcript()
    # A script that counts gets the losses that they had for the steps from 3 to 5.
    assert anew["losses"] == expected["anew"]
    for kind in kinds:
        assert again.common(kind)["digest"] == whole.common(kind)["digest"]
        assert again.common(kind)["loaded"] == whole.common(kind)["loaded"] == [f"global_step{SAVED_AT}", SAVED_AT]
    assert "train_batch returns at once for steps 3 to 5, with the losses that they had" in again.transcript()
    assert "load_checkpoint reads nothing, for the job is beyond at step 6" in again.transcript()


def test_a_job_that_continues_has_the_masks_and_the_size_of_batches_that_it_would_have_had(
    jobs: Jobs, tmp_path: Path, own: str
) -> None:
    """Its function for batches draws from a generator of its own, and its batches have grown at step 4."""
    own_size = TRAINING.micro_batches * 2
    shared = {"masks": True, "grows": {"4": 2 * own_size}}
    kinds = {"counts": {**shared, "by_count": True}, "asks": shared}
    short = dataclasses.replace(TRAINING, steps=6)

    def runs(training: Training, *, kept: bool) -> dict[str, dict[str, Any]]:
        return {
            kind: {
                "training": dataclasses.replace(training, name=f"{kind}-{training.steps}-{kept}"),
                "own": own,
                "kept": str(tmp_path / kind) if kept else None,
                **options,
            }
            for kind, options in kinds.items()
        }

    whole = jobs.run(resume_all, world=2, runs=runs(TRAINING, kept=False))
    jobs.run(resume_all, world=2, runs=runs(short, kept=True))
    again = jobs.run(resume_all, world=2, runs=runs(TRAINING, kept=True))
    expected = whole.common("counts")
    assert whole.common("asks")["losses"] == expected["losses"]
    assert again.common("counts")["losses"] == expected["losses"], again.transcript()
    assert again.common("asks")["losses"] == {step: expected["losses"][step] for step in ("6", "7")}
    assert {again.common(kind)["digest"] for kind in kinds} == {expected["digest"]}


def test_a_job_that_continues_drops_what_it_would_have_dropped_where_layers_are_seeded(
    jobs: Jobs, tmp_path: Path, own: str
) -> None:
    """Stock seeds them by the number of micro-batches since the job began."""
    seeded = dataclasses.replace(TRAINING, dropout=0.3, module={"seed_layers": True})

    def runs(steps: int, *, kept: bool) -> dict[str, dict[str, Any]]:
        training = dataclasses.replace(seeded, name=f"seeded-{steps}-{kept}", steps=steps)
        return {"run": {"training": training, "own": own, "by_count": True, "kept": str(tmp_path) if kept else None}}

    whole = jobs.run(resume_all, world=2, runs=runs(8, kept=False)).common("run")
    jobs.run(resume_all, world=2, runs=runs(6, kept=True))
    again = jobs.run(resume_all, world=2, runs=runs(8, kept=True))
    assert again.common("run") == whole, again.transcript()


@pytest.mark.parametrize(
    ("finds", "seeks", "by_count"),
    [
        (True, True, True),
        pytest.param(True, False, True, marks=pytest.mark.sweep),
        pytest.param(True, False, False, marks=pytest.mark.sweep),
        pytest.param(False, True, True, marks=pytest.mark.sweep),
    ],
)
def test_a_late_worker_of_a_job_that_loaded_has_the_data_of_the_others(
    jobs: Jobs, tmp_path: Path, own: str, finds: bool, seeks: bool, by_count: bool
) -> None:
    """The first stage's worker is lost, and replaced by the late one; so it reads the data."""
    script = {"own": own if finds else str(tmp_path / "absent"), "seeks": seeks, "by_count": by_count}
    plain = dataclasses.replace(TRAINING, name=f"plain-{finds}-{seeks}-{by_count}")
    whole = jobs.run(resume, world=2, training=plain, **script)
    lossy = dataclasses.replace(TRAINING, faults=[kill(SAVED_AT + 1, 0, 0, "forward", 1)], name="late")
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {str(SAVED_AT + 2): 1}}
    result = jobs.run(resume, world=2, training=lossy, **script, **more)
    assert result.survivors == [1, 2], result.transcript()
    assert result.common("digest") == whole.common("digest"), result.transcript()
    late, losses = result.values[2], whole.common("losses")
    assert late["hosted"] and late["loaded"] == result.values[1]["loaded"] == whole.common("loaded")
    assert late["losses"]["7"] == losses["7"] and result.values[1]["losses"] == losses
    # One that counts has a loss for each step that it asked for, of another step where the job was beyond.
    first = whole.common("loaded")[1]
    assert len(late["losses"]) == 8 - first if by_count else late["losses"].items() <= losses.items()


def resume_by_itself(
    training: Training,
    own: str,
    kept: str | None = None,
    waits: dict[str, int] | None = None,
    pretrained: str | None = None,
) -> dict[str, Any]:
    """The usual lines: load what there is, else ``pretrained`` weights, count from there, save now and then."""
    checkpoint = {"dir": kept, "interval_minutes": 1e-9} if kept is not None else {}
    engine = build(dataclasses.replace(training, bamboo={**training.bamboo, "checkpoint": checkpoint}))
    start = 0
    if Path(own, "latest").exists():
        _, state = engine.load_checkpoint(own)
        start = state["step"]
    elif pretrained is not None:
        engine.load_checkpoint(pretrained, load_module_only=True)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=start, count=training.micro_batches)
    losses: dict[str, float] = {}
    for step in range(start, training.steps):
        if not engine.catching_up:
            wait_for_joiners(engine, (waits or {}).get(str(step), 0))
        losses[str(step)] = float(engine.train_batch(data))
        if step % 3 == 2:
            engine.save_checkpoint(own, client_state={"step": step + 1})
    result = {"start": start, "losses": losses, "digest": engine.state_digest(), "steps": engine.global_steps}
    engine.close()
    return result


def resume_by_itself_all(runs: dict[str, dict[str, Any]], copies: dict[str, dict[str, str]]) -> dict[str, Any]:
    """One after the other; ``copies`` has, by run, the folders that are copied after it."""
    results = {}
    for name, run in runs.items():
        results[name] = resume_by_itself(**run)
        for source, target in copies.get(name, {}).items() if os.environ["RANK"] == "0" else ():
            shutil.copytree(source, target)  # the other rank meets this one before it reads anything
    return results


def test_a_script_that_continues_by_itself_continues_with_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """Its own checkpoint is of step 3, or of step 6, where the job has one of step 5."""

    def run(steps: int, own: str, kept: str | None = None) -> dict[str, Any]:
        training = dataclasses.replace(TRAINING, name=f"itself-{steps}-{own}-{kept}", steps=steps)
        folders = {"own": own, **({} if kept is None else {"kept": kept})}
        return {"training": training, **{key: str(tmp_path / folder) for key, folder in folders.items()}}

    runs = {
        "whole": run(7, "a"),
        "short": run(5, "b", "kept-b"),
        "older": run(7, "b", "kept-b"),
        "ahead": run(6, "c"),
        "newer": run(7, "c", "kept-c"),
    }
    copies = {"short": {str(tmp_path / f"{name}b"): str(tmp_path / f"{name}c") for name in ("", "kept-")}}
    result = jobs.run(resume_by_itself_all, world=2, runs=runs, copies=copies)
    expected = result.common("whole")
    for name, first in (("older", 3), ("newer", 6)):
        found = result.common(name)
        assert (found["start"], found["steps"]) == (first, 7), result.transcript()
        assert found["losses"] == {step: expected["losses"][step] for step in map(str, range(first, 7))}, name
        assert found["digest"] == expected["digest"], name
    said = "".join(result.outputs.values())
    assert "returns what the script saved after step 3, and loads nothing, for the job is at step 5" in said
    assert "is newer than the job's of step 5, so it is loaded: this job goes on from step 6" in said


@pytest.mark.sweep
def test_a_script_that_begins_with_pretrained_weights_continues_with_the_job(
    jobs: Jobs, tmp_path: Path, own: str
) -> None:
    """Started again it loads what it has saved after step 3; its job is at step 5."""

    def run(steps: int, folder: str, **more: str) -> dict[str, Any]:
        training = dataclasses.replace(TRAINING, name=f"tuned-{steps}-{folder}", steps=steps)
        return {"training": training, "own": str(tmp_path / folder), "pretrained": own, **more}

    kept = str(tmp_path / "kept")
    runs = {"whole": run(7, "a"), "short": run(5, "b", kept=kept), "again": run(7, "b", kept=kept)}
    result = jobs.run(resume_by_itself_all, world=2, runs=runs, copies={})
    expected, found = result.common("whole"), result.common("again")
    assert (found["start"], found["steps"], found["digest"]) == (3, 7, expected["digest"]), result.transcript()
    assert found["losses"] == {step: expected["losses"][step] for step in ("3", "4", "5", "6")}


@pytest.mark.sweep
@pytest.mark.parametrize("tuned", [False, True])
def test_a_late_worker_of_a_script_that_continues_by_itself_begins_at_what_was_saved(
    jobs: Jobs, tmp_path: Path, own: str, tuned: bool
) -> None:
    """Also where the others had begun with pretrained weights."""
    weights = {"pretrained": own} if tuned else {}
    plain = dataclasses.replace(TRAINING, name=f"itself-plain-{tuned}")
    expected = jobs.run(resume_by_itself, world=2, training=plain, own=str(tmp_path / "plain"), **weights)
    lossy = dataclasses.replace(TRAINING, faults=[kill(SAVED_AT + 1, 0, 0, "forward", 1)], name=f"itself-late-{tuned}")
    more: dict[str, Any] = {"joining": 1, "joining_after_deaths": 1, "waits": {str(SAVED_AT + 2): 1}, **weights}
    result = jobs.run(resume_by_itself, world=2, training=lossy, own=str(tmp_path / "lossy"), **more)
    assert result.survivors == [1, 2], result.transcript()
    losses = expected.common("losses")
    assert result.common("digest") == expected.common("digest"), result.transcript()
    assert result.values[2]["start"] == SAVED_AT and result.values[1]["losses"] == losses
    assert result.values[2]["losses"] == {step: losses[step] for step in map(str, range(SAVED_AT, 8))}
