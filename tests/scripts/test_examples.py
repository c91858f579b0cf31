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
    words = [word if word != "trained" else str(folder / "trained") for word in commands()[script]]
    program, *rest = words
    if program == "deepspeed":
        rest = ["--master_port", str(free_port("127.0.0.1")), *rest]
    return output_of(program, [*rest, "--steps", "5"], folder, cwd=REPOSITORY, faults=faults)


def output_of(
    program: str, arguments: list[str], folder: Path, *, cwd: Path, faults: list[dict[str, object]], **environment: str
) -> str:
    """What a launcher beside this Python prints. Fails if it fails."""
    (folder / "faults.json").write_text(json.dumps(faults))
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=cwd,
        env={
            **os.environ,
            **environment,
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
        output, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.sweep
@pytest.mark.timeout(900)  # each starts two jobs by the launcher, whose processes import much
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


def script_of_the_page() -> str:
    """The page's script on Hugging Face models, with the line that makes agents, and steps in place of its dots."""
    page = (REPOSITORY / "docs" / "huggingface.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```")[0]
    steps = (
        "import torch\n"
        "tokens = torch.arange(18).reshape(2, 9)\n"
        "for step in range(3):\n"
        "    print(f'step {step} loss {engine.train_batch(iter([(tokens, tokens)] * 2)).item():.9f}', flush=True)\n"
    )
    parts = re.split(r"^\.\.\.  # engine\.train_batch.*\n", block, flags=re.MULTILINE)
    assert len(parts) == 2, "the page's script has one place for the steps"
    return f"import deepspeed_bamboo.launched\n{parts[0]}{steps}{parts[1]}"


@pytest.mark.sweep
@pytest.mark.timeout(900)  # each starts two jobs by the launcher, whose processes import much
def test_the_script_of_the_page_on_hugging_face_survives_and_saves(tmp_path: Path) -> None:
    """Its four stages on two workers; options of the launch module are in the environment."""
    transformers = library("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=61))
    settings = {
        **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "bamboo": {"topology": {"max_restarts": 0}},
    }
    outputs, states = {}, {}
    for kind, faults in (("calm", []), ("killed", [{"step": 1, "stage": 1, "at": "backward", "micro_batch": 1}])):
        folder = tmp_path / kind
        model.save_pretrained(folder / "folder")
        (folder / "train.py").write_text(script_of_the_page(), encoding="utf-8")
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        options = ["--num_accelerators", "2", "--master_port", str(free_port("127.0.0.1")), "train.py"]
        given = {"BAMBOO_OPTIONS": "--bamboo_config settings.json --job page"}
        outputs[kind] = output_of("deepspeed", options, folder, cwd=folder, faults=list(faults), **given)
        states[kind] = transformers.AutoModelForCausalLM.from_pretrained(folder / "trained").state_dict()
    wanted, found = (set(_LOSS.findall(outputs[kind])) for kind in ("calm", "killed"))
    assert len(wanted) == 3 and found == wanted
    assert "was killed by SIGKILL" in outputs["killed"] and "was killed by SIGKILL" not in outputs["calm"]
    assert all(value.equal(states["killed"][name]) for name, value in states["calm"].items())
    assert not any(value.equal(model.state_dict()[name]) for name, value in states["calm"].items() if value.ndim > 1)
