"""Damaged checkpoints in real jobs: recognised on all workers alike, named, and the newest whole one is taken."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.manifest import NAMES
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, train_with_checkpoints
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import BF16, CLIPPED, FP16, ZERO

SHORT = Training("short-1x2", 2, steps=8, settings=CLIPPED, faults=[])
WHOLE = dataclasses.replace(SHORT, name="whole-1x2", steps=10)
LAYER = "layer_01-model_states.pt"


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


def damage(folder: Path, kind: str) -> None:
    """``folder`` has the checkpoints of steps 4 and 8."""
    last, before = folder / "bamboo_step8", folder / "bamboo_step4"
    if kind == "bit in a layer":
        flip(last / LAYER)
    elif kind == "truncated":
        path = last / "mp_rank_01_model_states.pt"
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "missing, and latest is empty":
        (last / LAYER).unlink()
        (folder / "latest").write_bytes(b"")
    elif kind == "of another step":
        shutil.copy(before / LAYER, last / LAYER)
    elif kind == "foreign":
        shutil.copy(last / LAYER, last / "layer_01-model_01-model_states.pt")
    elif kind == "garbage in latest":
        (folder / "latest").write_bytes(b"\xff\x00")
    elif kind == "before manifests":
        for tag in (last, before):
            for name in NAMES:
                (tag / name).unlink()


KINDS = {
    "bit in a layer": (4, f"bamboo_step8 is damaged: {LAYER} is not what was written"),
    "truncated": (4, "bamboo_step8 is damaged: mp_rank_01_model_states.pt has "),
    "missing, and latest is empty": (4, f"the file latest is empty; bamboo_step8 is damaged: {LAYER} is missing"),
    "of another step": (4, f"bamboo_step8 is damaged: {LAYER} is not what was written"),
    "foreign": (4, "bamboo_step8 is damaged: layer_01-model_01-model_states.pt does not belong to it"),
    "garbage in latest": (8, "the newest whole checkpoint is bamboo_step8, it is taken"),
    "before manifests": (8, "bamboo_step8 in {folder} has no manifest"),
}


def restore_each(training: Training, folders: dict[str, str]) -> dict[str, Any]:
    """The same training from each of ``folders``, one after the other; results by name."""
    results = {}
    for number, (name, folder) in enumerate(folders.items()):
        results[name] = train_with_checkpoints(dataclasses.replace(training, name=f"damaged{number}"), folder)
    return results


def test_the_newest_whole_one_is_taken_and_the_damage_is_named(jobs: Jobs, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    expected = jobs.run(train_with_checkpoints, world=2, training=WHOLE, folder=str(tmp_path / "whole"))
    jobs.run(train_with_checkpoints, world=2, training=SHORT, folder=str(kept))
    assert sorted(path.name for path in kept.iterdir() if path.is_dir()) == ["bamboo_step4", "bamboo_step8"]
    folders = {kind: tmp_path / f"damaged{number}" for number, kind in enumerate(KINDS)}
    for kind, folder in folders.items():
        shutil.copytree(kept, folder)
        damage(folder, kind)
    result = jobs.run(
        restore_each, world=2, training=WHOLE, folders={kind: str(folder) for kind, folder in folders.items()}
    )
    assert result.survivors == [0, 1], result.transcript()
    for kind, (step, words) in KINDS.items():
        for rank in (0, 1):
            own = result.values[rank][kind]
            assert sorted(own["losses"], key=int) == [str(n) for n in range(step, 10)], (kind, result.transcript())
            assert own["losses"] == {s: v for s, v in expected.common("losses").items() if int(s) >= step}, kind
            assert own["digest"] == expected.common("digest"), kind
        assert words.replace("{folder}", str(folders[kind])) in result.outputs[0], (kind, result.outputs[0])
        assert (folders[kind] / "latest").read_text() == "bamboo_step10"


PRECISIONS = {
    "fp16": {**CLIPPED, **FP16, **SCHEDULE},
    "bf16": {**CLIPPED, **BF16},
    "zero-fp16": {**CLIPPED, **ZERO, **FP16},
    "zero-bf16": {**CLIPPED, **ZERO, **BF16, **SCHEDULE},
}


def train_again(trainings: dict[str, Training], folder: str, steps: int) -> dict[str, Any]:
    """Each of ``trainings`` until ``steps``, with checkpoints of its own; results by name."""
    return {
        name: train_with_checkpoints(dataclasses.replace(training, steps=steps), f"{folder}/{name}")
        for name, training in trainings.items()
    }


@pytest.mark.sweep
@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 2)])
def test_no_code_is_needed_to_read_any_precision(jobs: Jobs, tmp_path: Path, world: int, stages: int) -> None:
    """What is read has the digest that was saved, and goes on as if it had not been saved."""
    trainings = {name: Training(name, stages, settings=settings, faults=[]) for name, settings in PRECISIONS.items()}
    whole = jobs.run(train_again, world=world, trainings=trainings, folder=str(tmp_path / "whole"), steps=6)
    jobs.run(train_again, world=world, trainings=trainings, folder=str(tmp_path / "kept"), steps=4)
    again = jobs.run(train_again, world=world, trainings=trainings, folder=str(tmp_path / "kept"), steps=6)
    assert again.survivors == list(range(world)), again.transcript()
    for name in trainings:
        for rank in range(world):
            expected, found = whole.values[rank][name], again.values[rank][name]
            assert found["digest"] == expected["digest"], name
            assert found["losses"] == {step: expected["losses"][step] for step in ("4", "5")}, name


def test_where_none_is_whole_no_rank_starts_and_nothing_changes(jobs: Jobs, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    jobs.run(train_with_checkpoints, world=2, training=SHORT, folder=str(kept))
    flip(kept / "bamboo_step4" / LAYER, 0.9)
    flip(kept / "bamboo_step8" / LAYER, 0.1)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file() and path.name != "bamboo.json"}
    refused = jobs.run(train_with_checkpoints, world=2, training=WHOLE, folder=str(kept))
    assert refused.survivors == []
    # All find out by themselves, but may hear first that another has ended for that.
    said = [output for output in refused.outputs.values() if "can be loaded: bamboo_step8 is damaged" in output]
    assert said and all("bamboo_step4 is damaged" in output for output in said), refused.transcript()
    others = [output for output in refused.outputs.values() if output not in said]
    assert all("the job failed on worker w" in output for output in others), refused.transcript()
    assert before == {path: path.read_bytes() for path in before}
    other = jobs.run(train_with_checkpoints, world=2, training=dataclasses.replace(WHOLE, stages=1), folder=str(kept))
    assert other.survivors == []


def test_a_script_that_loads_hears_of_damage_too(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(save_damage_and_load, world=2, training=SHORT, folder=str(tmp_path / "saved"))
    assert result.survivors == [0, 1], result.transcript()
    assert result.common("newest") == ["global_step2", 2, 2]
    explicit = result.common("explicit")
    assert "global_step4 is damaged: layer_00-model_states.pt is not what was written" in explicit
    assert "pass the tag of another one" in explicit
    assert "can be loaded: global_step4 is damaged" in result.common("none")
    assert result.common("nothing") == [None, None] and "nothing is loaded" in result.outputs[0]
    assert "load_checkpoint: global_step4 is damaged: layer_00" in result.outputs[0]


def save_damage_and_load(training: Training, folder: str) -> dict[str, Any]:
    """Two checkpoints of a script, of which the second one is damaged, then both."""
    from tests.runtime.scenarios import _from_step

    engine = build(training)
    iterator = _from_step(engine, training, 0)
    state = {"seen": 0}
    for _ in range(2):
        for _ in range(2):
            engine.train_batch(iterator)
        state["seen"] += 2
        engine.save_checkpoint(folder, client_state=state)
    engine.barrier()
    if engine.is_reporter:
        flip(Path(folder, "global_step4", "layer_00-model_states.pt"))
    engine.barrier()
    found: dict[str, Any] = {"explicit": refused(engine, folder, tag="global_step4")}
    path, client_state = engine.load_checkpoint(folder)
    found["newest"] = [Path(path).parent.name, client_state["seen"], engine.global_steps]
    found["nothing"] = list(engine.load_checkpoint(f"{folder}/absent"))
    engine.barrier()
    if engine.is_reporter:
        flip(Path(folder, "global_step2", "layer_00-model_states.pt"))
    engine.barrier()
    found["none"] = refused(engine, folder)
    engine.close()
    return found


def refused(engine: Any, folder: str, **arguments: Any) -> str:
    try:
        engine.load_checkpoint(folder, **arguments)
    except CheckpointError as error:
        return str(error)
    return ""
