from __future__ import annotations

from pathlib import Path

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.elastic.grid_told import told_pipelines
from deepspeed_bamboo.storage.manifest import NAMES, Manifest


def config(folder: Path, **topology: int) -> BambooConfig:
    return BambooConfig.model_validate({"checkpoint": {"dir": str(folder)}, "topology": topology})


def keep(folder: Path, tag: str, *, pipelines: int) -> None:
    (folder / tag).mkdir(parents=True)
    for name in NAMES:
        (folder / tag / name).write_text(Manifest(tag, 3, (pipelines, 4)).to_text(), encoding="utf-8")
    (folder / "latest").write_text(tag, encoding="utf-8")


def test_the_pipelines_are_the_users_then_the_checkpoints(tmp_path: Path) -> None:
    assert told_pipelines(BambooConfig()) is None
    assert told_pipelines(config(tmp_path)) is None, "nothing is kept yet"
    keep(tmp_path, "bamboo_step3", pipelines=2)
    assert told_pipelines(config(tmp_path)) == 2
    assert told_pipelines(config(tmp_path, pipelines=3)) == 3


def test_a_checkpoint_that_says_nothing_decides_nothing(tmp_path: Path) -> None:
    keep(tmp_path, "bamboo_step3", pipelines=2)
    for name in NAMES:
        (tmp_path / "bamboo_step3" / name).write_text("damaged", encoding="utf-8")
    assert told_pipelines(config(tmp_path)) is None
