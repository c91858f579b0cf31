"""The shell scripts: valid, runnable from anywhere, and careful with what they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


# Notes what it is asked to do. Has pip, which can install a uv that notes that, too, and its settings.
PYTHON = """#!/bin/sh
echo "$@" >> "{clone}/calls"
case "$*" in
  *"import torch"*) exit ${{NO_TORCH:-0}};;
  "-I - "*) printf "%s" "$ELSEWHERE";;
  "-I -") exec "{python}" "$@";;
  *"--target"*)
    test -z "$NO_UV" || exit 1
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin"
    cp "{clone}/uv" "$2/bin/uv";;
esac
"""
UV = """#!/bin/sh
echo uv "$@" >> "{clone}/calls"
env | grep -E "^(UV_|SSL_)" > "{clone}/settings"
exit ${{UV_FAILS:-0}}
"""


class TestPreparing:
    """scripts/environment.sh with a pretended environment."""

    @pytest.fixture(autouse=True)
    def pip_without_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in os.environ:
            if name.startswith(("PIP_", "UV_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    @pytest.fixture
    def clone(self, tmp_path: Path) -> Path:
        """A folder like a checkout, and an active environment."""
        (tmp_path / "setup.py").write_text("")
        python, uv = tmp_path / "venv" / "bin" / "python", tmp_path / "uv"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(clone=tmp_path, python=sys.executable))
        uv.write_text(UV.format(clone=tmp_path))
        python.chmod(0o755)
        uv.chmod(0o755)
        return tmp_path

    def prepare(self, clone: Path, extras: str = "", **more: str) -> list[str]:
        """Run ``prepare``; returns what python and uv were asked to do."""
        return self.run(clone, f'prepare "{extras}"', **more)

    def run(self, clone: Path, call: str, **more: str) -> list[str]:
        (clone / "calls").write_text("")
        path = f"{clone}/venv/bin:{os.environ['PATH']}"
        environment = {**os.environ, "VIRTUAL_ENV": str(clone / "venv"), "PATH": path, **more}
        command = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; {call}'
        subprocess.run(["bash", "-c", command], cwd=clone, env=environment, check=True, capture_output=True)
        return (clone / "calls").read_text().splitlines()

    def installing(self, clone: Path, extras: str = "", **more: str) -> list[str]:
        """What was asked of uv, and of pip but for installing that."""
        return [
            call
            for call in self.prepare(clone, extras, **more)
            if call.startswith(("uv", "-m pip install")) and "--target" not in call
        ]

    @pytest.mark.parametrize(
        "missing", [{}, {"NO_UV": "1"}, {"UV_FAILS": "1"}, {"PIP_KEYRING_PROVIDER": "import"}], ids=str
    )
    def test_an_installed_torch_is_respected(self, clone: Path, missing: dict[str, str]) -> None:
        calls = self.installing(clone, **missing)
        assert calls[-1].startswith("-m pip install" if missing else "uv pip install")
        assert all(call.endswith(" --editable .") for call in calls)
        assert len(calls) == 1 + ("UV_FAILS" in missing)

    @pytest.mark.parametrize("missing", [{}, {"NO_UV": "1"}], ids=str)
    def test_a_missing_torch_is_installed_with_the_rest(self, clone: Path, missing: dict[str, str]) -> None:
        (call,) = self.installing(clone, "[dev]", NO_TORCH="1", **missing)
        assert " --editable .[dev] torch" in call

    def test_uv_is_told_what_pip_is_configured_for(self, clone: Path, tmp_path: Path) -> None:
        file = tmp_path / "pip.conf"
        file.write_text("[global]\nindex-url = https://a/simple\nfind-links = /one\n  /two\n[install]\ntimeout = 7\n")
        self.prepare(clone, PIP_CONFIG_FILE=str(file), PIP_INDEX_URL="https://b/simple", PIP_EXTRA_INDEX_URL="c d")
        assert set((clone / "settings").read_text().splitlines()) >= {
            "UV_DEFAULT_INDEX=https://b/simple",
            "UV_INDEX=c d",
            "UV_FIND_LINKS=/one,/two",
            "UV_HTTP_TIMEOUT=7",
            "UV_INDEX_STRATEGY=unsafe-best-match",
        }

    def test_imports_are_compiled_once(self, clone: Path) -> None:
        assert self.run(clone, "compile_once -m preloaded") == ["-m preloaded"]
        assert self.run(clone, "compile_once -m preloaded") == []

    def test_uv_stays_nowhere(self, clone: Path, tmp_path: Path) -> None:
        folder = tmp_path / "temporary"
        folder.mkdir()
        assert any("--target" in call for call in self.prepare(clone, TMPDIR=str(folder)))
        assert list(folder.iterdir()) == []

    def test_a_package_of_another_checkout_stays_there(self, clone: Path) -> None:
        assert self.installing(clone, "[dev]", ELSEWHERE="/another") == []

    def test_a_plain_install_from_here_stays_where_no_extras_are_wanted(self, clone: Path) -> None:
        assert self.installing(clone, ELSEWHERE=str(clone)) == []
        (call,) = self.installing(clone, "[dev]", ELSEWHERE=str(clone))
        assert call.endswith(" --editable .[dev]")

    @pytest.mark.parametrize(
        ("described", "printed"),
        [
            ({"url": "file://{here}", "dir_info": {"editable": True}}, ""),
            ({"url": "file://{here}", "dir_info": {}}, "{here}"),
            ({"url": "file://{other}", "dir_info": {"editable": True}}, "{other}"),
            ({"url": "file:///gone", "dir_info": {}}, ""),
            (None, "a package index"),
        ],
    )
    def test_where_the_package_is_from(self, described: dict[str, Any] | None, printed: str, tmp_path: Path) -> None:
        places = {"here": str(tmp_path / "here"), "other": str(tmp_path / "other")}
        metadata = tmp_path / "site" / "deepspeed_bamboo-0.1.dist-info"
        for folder in (*places.values(), metadata):
            Path(folder).mkdir(parents=True)
        (metadata / "METADATA").write_text("Name: deepspeed_bamboo\nVersion: 0.1\n")
        if described is not None:
            text = json.dumps({**described, "url": described["url"].format(**places)})
            (metadata / "direct_url.json").write_text(text)
        (tmp_path / "python").write_text(
            f'#!/bin/sh\nshift\nPYTHONPATH="{tmp_path}/site" exec "{sys.executable}" -S "$@"\n'
        )
        (tmp_path / "python").chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", f'source "{SCRIPTS}/environment.sh"; installed_elsewhere'],
            cwd=places["here"],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == printed.format(**places)

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
