"""scripts/codebases.py: what it says it replaces is what it replaces, and nothing runs without a checkout."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts.loading import SCRIPTS, load_script


@pytest.fixture
def codebases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [path.stem for path in SCRIPTS.glob("codebase*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return load_script("codebases")


def test_each_codebase_names_what_is_replaced_for_it(codebases: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert codebases.main(["--list"]) == 0
    shown = capsys.readouterr().out
    run = load_script("codebase_run")
    for name, codebase in codebases.CODEBASES.items():
        assert f"{name}: {codebase.script}" in shown
        assert codebase.shims and all(run.SHIMS[shim].__doc__ in shown for shim in codebase.shims)
        values = {"stages": 2, "steps": 3, "first": 3, "saved": -1, "settings": "s", "checkout": "c", "port": 29500}
        made = [text.format(**values) for text in codebase.arguments]
        assert {"s", "--cfg-path"} & set(made), "the configuration is named, or a file of its own that has it"


def test_a_folder_without_the_codebase_is_refused(
    codebases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        codebases.main(["qlora-pipe", str(tmp_path)])
    assert "has no utils/engine.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        codebases.main([])


def test_runs_are_not_kept_among_other_files(
    codebases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit):
        codebases.main(["qlora-pipe", str(tmp_path), "--keep", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


def test_losses_are_read_by_step(codebases: Any) -> None:
    run = codebases.Run(0, "x LOSS 9 1\nLOSS 1 2.5\nLOSS 2 0.25\nLOSS 1 2.5\n")
    assert run.losses == {"1": "2.5", "2": "0.25"}


def test_which_stages_were_taken_over_is_read(codebases: Any) -> None:
    assert codebases.Run(0, "x\n").taken_over == []
    lines = "[bamboo w0] step 2: took 0.1 over from w1, pause 0.10 s\n" * 2
    assert codebases.Run(0, lines).taken_over == ["1", "1"]


def test_what_runs_have_saved_is_compared_bit_by_bit(codebases: Any, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    files = load_script("codebase_files")
    weight = torch.tensor([0.0, 1.5], dtype=torch.bfloat16)
    saved = [
        {"w": weight, "moments": [torch.zeros(()), torch.tensor(True)]},
        {"w": weight, "moments": [torch.zeros(()), torch.tensor(False)]},
        {"w": weight * -1, "more": torch.ones(1)},
    ]
    runs = []
    for number, (date, state) in enumerate(zip(("20260101_01-02-03", "20260101_01-02-04", "x"), saved, strict=True)):
        folder = tmp_path / str(number) / date
        folder.mkdir(parents=True)
        torch.save(state, folder / "state.pt")
        save_file({"only": weight}, folder / "a.safetensors")
        runs.append(files.saved_tensors(tmp_path / str(number)))
    assert files.differences(runs[0], runs[0]) == []
    assert files.differences(runs[0], runs[1]) == ["DATE/state.pt moments 1 differs"]
    assert "x/state.pt more is in one of them only" in files.differences(runs[0], runs[2])
    assert files.differences({"w": weight}, {"w": -weight}) == ["w differs"], "the sign of a zero, too"
    assert files.differences({"w": weight}, {"w": weight.float()}) == ["w differs"]


def test_a_line_is_changed_only_where_there_is_exactly_one(
    codebases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the script's takes the place of
    run = load_script("codebase_run")
    script = tmp_path / "train.py"
    script.write_text("made = 1 if False else None\nraise SystemExit(made or 0)\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run.run_changed(script, [(r"(?m)^(made = \S+) if .*$", r"\1")])
    assert ended.value.code == 1
    with pytest.raises(SystemExit, match="0 places are like"):
        run.run_changed(script, [("writer", "")])


def test_a_module_is_imported_with_its_lines_changed_and_another_of_that_name_is_not(
    codebases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = load_script("codebase_parts")
    for folder in ("readers_of_all", "others_of_all"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "sets.py").write_text("reads = 1\nkept = 2\n", encoding="utf-8")
        for name in (folder, f"{folder}.sets"):
            monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    changes = parts.changes_by_file([("readers_of_all/sets.py", "reads = 1", "reads = 3")])
    parts.import_changed({tmp_path / file: its for file, its in changes.items()})
    modules = [importlib.import_module(f"{folder}.sets") for folder in ("readers_of_all", "others_of_all")]
    assert [(module.reads, module.kept) for module in modules] == [(3, 2), (1, 2)]
    for name in ("readers_of_all", "others_of_all"):
        sys.modules.pop(name), sys.modules.pop(f"{name}.sets")


CHECKOUTS = "BAMBOO_CODEBASES"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        *("deepspeed-examples", "megatron-deepspeed", "transpeeder", "gpt-neox", "mpp-llava", "diffusion-pipe"),
        *("diffusion-pipe-deeper", "collie", "qlora-pipe"),
    ],
)
def test_a_codebase_runs_as_it_should(codebases: Any, name: str) -> None:
    checkout = Path(os.environ.get(CHECKOUTS, ""), name.removesuffix("-deeper"))
    if CHECKOUTS not in os.environ or not checkout.is_dir():
        pytest.skip(f"{CHECKOUTS} names no folder with a checkout {name}; nothing is fetched")
    assert codebases.main([name, str(checkout)]) == 0
