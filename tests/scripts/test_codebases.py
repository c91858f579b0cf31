"""scripts/codebases.py: what it says it replaces is what it replaces, and nothing runs without a checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import SCRIPTS, load_script


@pytest.fixture
def codebases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("codebases", "codebase_run"):
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
        assert "s" in made, "the configuration is named"


def test_a_folder_without_the_codebase_is_refused(
    codebases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        codebases.main(["qlora-pipe", str(tmp_path)])
    assert "has no utils/engine.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        codebases.main([])


def test_losses_are_read_by_step(codebases: Any) -> None:
    run = codebases.Run(0, "x LOSS 9 1\nLOSS 1 2.5\nLOSS 2 0.25\nLOSS 1 2.5\n")
    assert run.losses == {"1": "2.5", "2": "0.25"}


CHECKOUTS = "BAMBOO_CODEBASES"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["deepspeed-examples", "megatron-deepspeed", "transpeeder", "gpt-neox", "qlora-pipe"])
def test_a_codebase_runs_as_it_should(codebases: Any, name: str) -> None:
    checkout = Path(os.environ.get(CHECKOUTS, ""), name)
    if CHECKOUTS not in os.environ or not checkout.is_dir():
        pytest.skip(f"{CHECKOUTS} names no folder with a checkout {name}; nothing is fetched")
    assert codebases.main([name, str(checkout)]) == 0
