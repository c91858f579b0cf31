"""The examples are run as their README says, undisturbed and with a loss."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_bamboo.coordination.server import free_port
from tests.models.test_references import library

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
# Two workers may write on one line.
_LOSS = re.compile(r"(?:step \d+ loss|evaluation) \d+\.\d{9}")


def commands() -> dict[str, list[str]]:
    """The README's commands by the script that they run."""
    lines = (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines()
    found = [shlex.split(line) for line in lines if line.startswith(("deepspeed ", "torchrun "))]
    return {next(Path(word).stem for word in words if word.endswith(".py")): words for words in found}


def test_each_example_is_python_that_has_a_command_in_the_readme() -> None:
    assert len(SCRIPTS) == 3 and {script.stem for script in SCRIPTS} == commands().keys()
    for script in SCRIPTS:
        assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    for words in commands().values():
        assert (REPOSITORY / words[words.index("--deepspeed_config") + 1]).is_file()


def run(script: str, folder: Path, *, faults: list[dict[str, object]]) -> str:
    """The output of an example, as its README starts it. Fails if it fails."""
    folder.mkdir()
    (folder / "faults.json").write_text(json.dumps(faults))
    words = [word if word != "trained" else str(folder / "trained") for word in commands()[script]]
    program, *rest = words
    if program == "deepspeed":
        rest = ["--master_port", str(free_port("127.0.0.1")), *rest]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name(program)), *rest, "--steps", "5"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "BAMBOO_FAULTS": str(folder / "faults.json"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.sweep
@pytest.mark.parametrize("script", [script.stem for script in SCRIPTS])
def test_an_example_runs_and_survives(script: str, tmp_path: Path) -> None:
    if script == "huggingface_decoder":
        library("transformers")
    calm = run(script, tmp_path / "calm", faults=[])
    killed = run(script, tmp_path / "killed", faults=[{"step": 2, "stage": 1, "at": "backward", "micro_batch": 1}])
    wanted, found = (set(_LOSS.findall(output)) for output in (calm, killed))
    assert len(wanted) >= 5 and found == wanted
    assert "was killed by SIGKILL" in killed and "was killed by SIGKILL" not in calm
    if script == "huggingface_decoder":
        load = library("transformers").AutoModelForCausalLM.from_pretrained
        states = [load(tmp_path / kind / "trained").state_dict() for kind in ("calm", "killed")]
        assert all(value.equal(states[1][name]) for name, value in states[0].items())
