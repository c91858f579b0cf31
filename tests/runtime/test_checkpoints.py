"""Checkpoints of a job that loses workers before, while and after it saves or loads: the same bits as without."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, load_and_train, train_and_save, train_with_joiners
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, FP16, ZERO, kill

SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}}
SAVE_AT, STEPS = 3, 5


def _training(name: str, stages: int, **more: Any) -> Training:
    return Training(name, stages, steps=STEPS, bamboo=CHECKED, faults=[], **more)


CASES = [
    (2, _training("bf16-1x2", 2, settings={**CLIPPED, **BF16})),
]
SWEEP_CASES = [
    (3, _training("tied-1x3", 3, layers="tied", settings={**CLIPPED, **SCHEDULE}, dropout=0.2)),
    (4, _training("zero-fp16-2x2", 2, settings={**CLIPPED, **ZERO, **FP16})),
    (4, _training("fp16-2x2", 2, settings={**CLIPPED, **FP16})),
    (3, _training("bf16-3x1", 1, settings={**CLIPPED, **BF16})),
    (3, _training("zero-bf16-3x1", 1, settings={**CLIPPED, **ZERO, **BF16})),
]


def _faulty(training: Training, *faults: dict[str, Any]) -> Training:
    return dataclasses.replace(training, faults=list(faults))


@pytest.mark.parametrize(
    ("world", "training"),
    [
        *(pytest.param(*case, id=case[1].name) for case in CASES),
        *(pytest.param(*case, id=case[1].name, marks=pytest.mark.sweep) for case in SWEEP_CASES),
    ],
)
def test_losses_around_a_checkpoint(jobs: Jobs, tmp_path: Path, world: int, training: Training) -> None:
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    expected = jobs.run(train_and_save, world=world, training=training, folder=whole, save_at=SAVE_AT)
    losses, digest = expected.common("losses"), expected.common("digest")
    # One worker owns two stages when it saves; with more than two workers another is lost while they save.
    lost = {"pipeline": 0, "stage": 1} if training.stages > 1 else {"pipeline": 1, "stage": 0}
    before = [{**kill(1, 0, 1, "backward", 1), **lost}, *([kill(SAVE_AT, 0, 0, "save")] if world > 2 else [])]
    saved = jobs.run(train_and_save, world=world, training=_faulty(training, *before), folder=broken, save_at=SAVE_AT)
    assert len(saved.survivors) == world - len(before), saved.transcript()
    assert saved.common("losses") == losses and saved.common("digest") == digest
    # Their shadows have what owners read: one is lost while they read, another afterwards.
    after = [{**kill(SAVE_AT, 0, 1, "forward", 2), **lost}, *([kill(0, 0, 0, "load")] if world > 2 else [])]
    again = jobs.run(load_and_train, world=world, training=_faulty(training, *after), folder=broken)
    assert len(again.survivors) == world - len(after), again.transcript()
    assert again.common("found") == SAVE_AT
    assert again.common("losses") == losses[SAVE_AT:] and again.common("digest") == digest
    assert Path(broken, "latest").read_text() == f"global_step{SAVE_AT}"
    assert sorted(p.name for p in Path(broken).rglob("*.pt")) == sorted(p.name for p in Path(whole).rglob("*.pt"))


def test_who_stands_by_saves_and_reads_with_the_others(jobs: Jobs, tmp_path: Path) -> None:
    training, folder = _training("standing-by-1x2", 2), str(tmp_path / "saved")
    expected = jobs.run(train_and_save, world=2, training=training, folder=folder, save_at=SAVE_AT)
    saved = jobs.run(
        train_with_joiners,
        world=2,
        joining=1,
        training=training,
        waits={"1": 1},
        saves=(SAVE_AT, str(tmp_path / "late")),
    )
    assert saved.common("digest") == expected.common("digest")
    assert sorted(map(len, (saved.values[rank]["hosted"] for rank in range(3)))) == [0, 1, 1]
    again = jobs.run(load_and_train, world=2, training=training, folder=str(tmp_path / "late"))
    assert again.common("found") == SAVE_AT and again.common("digest") == expected.common("digest")
    # A worker that owned both stages reads them; its first reading was of the one it had then.
    lossy = _faulty(training, kill(SAVE_AT, 0, 1, "forward", 2))
    twice = jobs.run(load_and_train, world=2, training=lossy, folder=folder, twice=True)
    assert twice.common("losses") == expected.common("losses")[SAVE_AT:]
    assert twice.common("digest") == expected.common("digest")


@pytest.mark.sweep
def test_stock_reads_what_a_job_with_losses_saved_and_the_other_way_round(jobs: Jobs, tmp_path: Path) -> None:
    training = _training("both-1x3", 3, settings=CLIPPED)
    stock = dataclasses.replace(training, faults=None)
    own, theirs = str(tmp_path / "own"), str(tmp_path / "theirs")
    lossy = _faulty(training, kill(1, 0, 1, "backward", 1))
    saved = jobs.run(train_and_save, world=3, training=lossy, folder=own, save_at=SAVE_AT)
    stock_saved = jobs.run(train_and_save, world=3, training=stock, folder=theirs, save_at=SAVE_AT)
    by_stock = jobs.run(load_and_train, world=3, training=stock, folder=own)
    by_plugin = jobs.run(load_and_train, world=3, training=training, folder=theirs)
    losses = saved.common("losses")
    assert stock_saved.common("losses") == losses
    assert by_stock.common("losses") == by_plugin.common("losses") == losses[SAVE_AT:]
    hashes = {name: value for rank in saved.survivors for name, value in saved.values[rank]["hashes"].items()}
    # After a loss a worker's first module also shows the weights of the stages that were taken over.
    for other in (stock_saved, by_stock, by_plugin):
        found = {name: value for rank in range(3) for name, value in other.values[rank]["hashes"].items()}
        assert found.items() <= hashes.items()


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 2])
def test_stock_reads_on_the_full_grid_what_fewer_workers_saved(jobs: Jobs, tmp_path: Path, workers: int) -> None:
    training, folder = _training("few-1x3", 3, settings=CLIPPED), str(tmp_path / "saved")
    saved = jobs.run(train_and_save, world=workers, training=training, folder=folder, save_at=SAVE_AT)
    stock = dataclasses.replace(training, faults=None)
    by_stock = jobs.run(load_and_train, world=3, training=stock, folder=folder)
    assert by_stock.common("found") == SAVE_AT
    assert by_stock.common("losses") == saved.common("losses")[SAVE_AT:]


def test_no_checkpoint_and_one_that_only_some_see(jobs: Jobs, tmp_path: Path) -> None:
    training = _training("none-1x2", 2)
    fresh = jobs.run(load_and_train, world=2, training=training, folder=str(tmp_path / "empty"))
    assert fresh.common("found") is None and len(fresh.common("losses")) == STEPS
    jobs.run(train_and_save, world=2, training=training, folder=str(tmp_path / "rank0"), save_at=SAVE_AT)
    result = jobs.run(load_own_folder, world=2, training=training, folder=str(tmp_path))
    assert result.survivors == []
    assert "found no checkpoint in" in result.transcript() and "all machines see" in result.transcript()


def test_what_cannot_be_read_or_written_is_named(jobs: Jobs, tmp_path: Path) -> None:
    training, folder = _training("broken-1x2", 2), tmp_path / "saved"
    result = jobs.run(save_and_break, world=2, training=training, folder=str(folder))
    tag = f"global_step{training.steps}"
    wanted = {
        "unknown tag": f"no checkpoint 'nowhere' in '{folder}'; pass the tag of one that there is: {tag}",
        "empty latest": f"the file latest in '{folder}' is empty; pass the tag of one that there is: {tag}",
        "missing layers": f"the checkpoint '{folder}/{tag}' lacks files of stage ",
        "unwritable": "can't be saved as ",
    }
    for rank in range(2):
        assert result.values[rank]["kinds"] == ["CheckpointError"] * 4, result.transcript()
        for name, text in wanted.items():
            assert text in result.values[rank][name], result.transcript()


def save_and_break(training: Training, folder: str) -> dict[str, Any]:
    """Save a checkpoint, then ask for what isn't there; each time as if that was all, for it would end the job."""
    from tests.runtime.scenarios import build

    engine = build(training)
    engine.global_steps = training.steps
    engine.save_checkpoint(folder)
    rank, tag = int(os.environ["RANK"]), Path(folder, f"global_step{training.steps}")
    found: dict[str, Any] = {"kinds": []}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - its kind is looked at
            found["kinds"].append(type(error).__name__)
            found[name] = str(error)

    attempt("unknown tag", lambda: engine._load_checkpoint(folder, "nowhere"))
    attempt("empty latest", lambda: engine._load_checkpoint(folder, ""))
    engine.barrier()
    if rank == 0:
        for file in tag.glob("layer_*"):
            file.unlink()
    engine.barrier()
    attempt("missing layers", lambda: engine._load_checkpoint(folder, tag.name))
    engine.checkpoint_engine.save = _no_room
    attempt("unwritable", lambda: engine._save_checkpoint(folder, "full"))
    # Whoever ends has the job end; the other one is to come to its own error before.
    Path(folder, f"ended{rank}").touch()
    while not all(Path(folder, f"ended{other}").exists() for other in range(2)):
        time.sleep(0.01)
    return found


def _no_room(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def load_own_folder(training: Training, folder: str) -> dict[str, Any]:
    """Read from a folder that only this rank's machine has."""
    return load_and_train(training, f"{folder}/rank{os.environ['RANK']}")
