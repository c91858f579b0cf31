"""The shell scripts: valid, runnable from anywhere, and careful with what they find."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.scripts.loading import SCRIPTS, load_script

ROOT = SCRIPTS.parent
SHELL = [*sorted(SCRIPTS.glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_bash_can_read_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize("script", [SCRIPTS / "demo.sh", SCRIPTS / "test.sh", ROOT / ".ci" / "run"], ids=str)
def test_commands_are_executable_and_stop_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


class TestPreparing:
    """scripts/environment.sh with a pretended environment."""

    @pytest.fixture
    def clone(self, tmp_path: Path) -> Path:
        """A folder like a checkout, and an active environment whose python notes what it is asked to do."""
        (tmp_path / "setup.py").write_text("")
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(
            f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\ncase "$*" in *"import torch"*) exit ${{NO_TORCH:-0}};; '
            '-I*) printf "%s" "$ELSEWHERE";; esac\n'
        )
        python.chmod(0o755)
        return tmp_path

    def prepare(self, clone: Path, extras: str = "", **more: str) -> list[str]:
        """Run ``prepare``; returns what python was asked to do."""
        (clone / "calls").write_text("")
        path = f"{clone}/venv/bin:{os.environ['PATH']}"
        environment = {**os.environ, "VIRTUAL_ENV": str(clone / "venv"), "PATH": path, **more}
        command = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; prepare "{extras}"'
        subprocess.run(["bash", "-c", command], cwd=clone, env=environment, check=True, capture_output=True)
        return (clone / "calls").read_text().splitlines()

    def test_an_installed_torch_is_respected(self, clone: Path) -> None:
        calls = self.prepare(clone)
        assert [call for call in calls if "pip" in call] == ["-m pip install --quiet --editable ."]

    def test_a_missing_torch_is_installed_first(self, clone: Path) -> None:
        pip = [call for call in self.prepare(clone, "[dev]", NO_TORCH="1") if "pip" in call]
        assert len(pip) == 2
        assert "torch" in pip[0]
        assert pip[1].endswith(".[dev]")

    def test_a_package_of_another_checkout_stays_there(self, clone: Path) -> None:
        assert [call for call in self.prepare(clone, "[dev]", ELSEWHERE="/another") if "pip" in call] == []

    def test_a_second_run_installs_nothing(self, clone: Path) -> None:
        self.prepare(clone)
        assert self.prepare(clone) == []
        assert self.prepare(clone, "[dev]") != []

    def test_a_changed_setup_is_installed_again(self, clone: Path) -> None:
        self.prepare(clone)
        later = (clone / "setup.py").stat().st_mtime + 100
        os.utime(clone / "setup.py", (later, later))
        assert self.prepare(clone) != []


def test_fault_sweep_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = load_script("fault_sweep")
    assert sweep.main(["--profile", "first", "--only", "M4/STOP-*", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert sweep.main(["--profile", "first", "--only", "nothing", "--list"]) == 1
