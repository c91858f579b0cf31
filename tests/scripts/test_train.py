"""scripts/train.py as an ordinary DeepSpeed script: one worker, DeepSpeed's own engine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepspeed_bamboo.eventlog.summary import RunSummary, differences, load_run
from deepspeed_bamboo.sweep.job import free_port
from deepspeed_bamboo.testing.fork_server import ForkRequest, ForkServer, reference
from tests.scripts import forked_script
from tests.scripts.loading import SCRIPTS, load_script

STEPS = 3
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it has printed."""

    code: int | None
    output: str


def train(server: ForkServer, folder: Path, *arguments: str) -> Ended:
    """Run the script alone on one worker; its event log is ``folder``/events."""
    folder.mkdir(exist_ok=True)
    configuration, output = folder / "deepspeed.json", folder / "output"
    configuration.write_text(json.dumps(SETTINGS))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **alone, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    options = ["--steps", str(STEPS), "--deepspeed_config", str(configuration), "--event-log", str(folder / "events")]
    request = ForkRequest(
        target=reference(forked_script.run),
        arguments=(str(SCRIPTS / "train.py"), [*options, *arguments], environment),
        output=str(output),
    )
    code = server.fork(request).exit_code(within_seconds=120)
    return Ended(code, output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("She sells sea shells by the sea shore. " * 500)
    return path


def summary_of(result: Ended, folder: Path) -> RunSummary:
    assert result.code == 0, result.output
    return load_run(folder / "events")


def test_it_trains_reports_and_logs(fork_server: ForkServer, tmp_path: Path, text: Path) -> None:
    result = train(fork_server, tmp_path / "one", "--data", str(text), "--dropout", "0.1", "--tied")
    summary = summary_of(result, tmp_path / "one")
    assert sorted(summary.losses) == list(range(STEPS))
    assert summary.losses[STEPS - 1] < summary.losses[0]
    assert (summary.final_step, summary.digest, summary.failovers) == (STEPS, None, ())
    assert f"step {STEPS - 1}  loss {summary.losses[STEPS - 1]:.4f}" in result.output
    assert f"finished {STEPS} steps" in result.output

    again = summary_of(
        train(fork_server, tmp_path / "two", "--data", str(text), "--dropout", "0.1", "--tied"), tmp_path / "two"
    )
    (problem,) = differences(summary, again)
    assert problem.startswith("neither run has a digest")

    other = train(fork_server, tmp_path / "two", "--data", str(text), "--dropout", "0.1", "--tied", "--seed", "5")
    newest = summary_of(other, tmp_path / "two")
    assert sorted(newest.losses) == list(range(STEPS)) and newest.losses != summary.losses
    assert newest.runs == 2 and newest.parts > again.parts, "the second run in the same folder"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--deepspeed_config", "x", "--model", "gpt3"], "gpt2-tiny"),
        ([], "--deepspeed_config"),
    ],
)
def test_wrong_arguments_are_a_usage_error(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_script("train").parse_arguments(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
