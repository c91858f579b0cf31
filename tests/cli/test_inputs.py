"""Text files with a byte-order mark, and numbers that are none: in files and on the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import build_parser, main
from deepspeed_bamboo.cli.node_files import read_sites
from deepspeed_bamboo.cloud.fleet_spec import read_fleet_spec
from deepspeed_bamboo.cloud.scripted import load_script
from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.doctor.machine import ThisMachine
from deepspeed_bamboo.doctor.storage import check_storage
from deepspeed_bamboo.doctor.subject import Subject, read_hosts
from deepspeed_bamboo.elastic.settings_source import hjson_value, section_in_script
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.sim.cost import ProfileError, profile_from_json
from deepspeed_bamboo.sim.prices import read_prices
from deepspeed_bamboo.sim.scenario import load_scenario

CONFIGS = Path(__file__).parents[2] / "configs"


def marked(folder: Path, text: str) -> Path:
    """A file of ``text`` as Windows programs write it."""
    path = folder / "marked"
    path.write_text(text, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("text", ["worker,node,zone\nw0,n0,a\n", '[["w0", "n0", "a"]]'])
def test_a_byte_order_mark_is_no_part_of_workers(text: str, tmp_path: Path) -> None:
    assert [list(site) for site in read_sites(marked(tmp_path, text))] == [["w0", "n0", "a"]]


def test_a_byte_order_mark_is_no_part_of_any_file(tmp_path: Path) -> None:
    assert hjson_value(str(marked(tmp_path, '{"a": 1}'))) == {"a": 1}
    assert section_in_script(str(marked(tmp_path, 'config = {"bamboo": {}}'))) is not None
    assert [host.name for host in read_hosts(marked(tmp_path, "n0 slots=4\n"))] == ["n0"]
    assert FaultScript.load(marked(tmp_path, "[]")).faults == ()
    assert load_script(str(marked(tmp_path, '[{"after_seconds": 1, "seconds": 2}]')), where="here")[0].seconds == 2
    assert load_scenario(marked(tmp_path, '{"preset": "bert"}')) == load_scenario(_file(tmp_path, '{"preset": "bert"}'))
    prices = CONFIGS / "sim" / "example-prices.csv"
    assert read_prices(marked(tmp_path, prices.read_text())) == read_prices(prices)
    fleet = CONFIGS / "fleet" / "aws.json"
    assert read_fleet_spec(marked(tmp_path, fleet.read_text())) == read_fleet_spec(fleet)


def _file(folder: Path, text: str) -> Path:
    path = folder / "plain"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_number_that_no_computer_holds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, '{"bamboo": {"coordinator": {"lease_seconds": 1e400}}}')
    assert main(["check", str(path)]) == 1
    assert "has a number that is too large" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="too large"):
        hjson_value(str(path))


def test_a_profile_of_infinite_numbers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = {"forward_seconds": 1, "backward_seconds": 2, "parameters": 3, "output_bytes": 4}
    text = json.dumps({"name": "x", "layers": [layer], "micro_batch_samples": 1, "link_bytes_per_second": 1})
    assert profile_from_json(text).name == "x"
    with pytest.raises(ProfileError, match="link_bytes_per_second is inf; give a finite number"):
        profile_from_json(text.replace('"link_bytes_per_second": 1', '"link_bytes_per_second": 1e400'))
    nodes = _file(tmp_path, "w0,n0,a\n")
    placement = tmp_path / "placement"
    placement.write_text('{"pipelines": 1e400, "stages": 1, "owners": {}, "shadows": {}}')
    command = ["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "1", "--current", str(placement)]
    assert main(command) == 2
    assert "no placement" in capsys.readouterr().err


def test_no_option_takes_a_number_that_is_none() -> None:
    """``float`` itself takes nan and inf, which nothing behind it can use."""
    [commands] = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    assert [one for parser in commands.choices.values() for one in parser._actions if one.type is float] == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "x"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--nodes", "n", "--pipelines", "1", "--stages", "1", "--device-gib"],
        ["simulate", "--preset", "bert", "--duration-hours"],
        ["simulate", "--preset", "bert", "--removal-probability"],
        ["advise", "--preset", "bert", "--deadline-hours"],
        ["advise", "--preset", "bert", "--confidence"],
        ["compare", "a", "b", "--minimum-fall"],
        ["run", "--pause-seconds"],
    ],
)
def test_a_number_has_to_be_finite(command: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command[:-1], f"{command[-1]}={value}"])
    assert ended.value.code == 2
    assert f"argument {command[-1]}: '{value}' is no finite number; write one such as 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-4"])
def test_a_device_has_memory(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--nodes", "n", "--pipelines", "1", "--stages", "1", f"--device-gib={value}"])
    assert f"argument --device-gib: {value} must be above 0" in capsys.readouterr().err


def test_one_worker_has_no_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages", "1", "--micro-batches", "2", "--lost", "0", "--at", "1"]) == 2
    said = capsys.readouterr().err
    assert "no neighbour that could keep its shadow; add --stages" in said and "mode off" not in said


@pytest.mark.parametrize(("nodes", "code"), [("w0,n0\nw1,n1\n", 0), ("w0,n0\n", 3)])
def test_the_exit_code_agrees_with_the_text(
    nodes: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--nodes", str(_file(tmp_path, nodes)), "--pipelines", "1", "--stages", "1"]
    assert main(command) == code
    assert ("FATAL" in capsys.readouterr().out) == (code == 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", 'has no "bamboo" section: this is plain DeepSpeed'), ('{"bamboo": {"enabled": false}}', "plain DeepSpeed")],
)
def test_doctor_names_a_file_that_does_not_turn_the_plugin_on(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_bamboo.cli.doctor.examine", lambda subject: ())
    assert main(["doctor", "--config", str(_file(tmp_path, text))]) == 0
    assert words in capsys.readouterr().out


def test_doctor_names_a_folder_that_is_not_mounted(tmp_path: Path) -> None:
    def said(place: Path) -> list[str]:
        section = BambooConfig.model_validate({"checkpoint": {"dir": str(place)}})
        return [str(one) for one in check_storage(Subject(ThisMachine(), section=section))]

    assert said(tmp_path / "checkpoints") == []
    [words] = said(tmp_path / "shared" / "checkpoints")
    assert f"the folder {tmp_path / 'shared'} is not there" in words


def test_a_missing_field_is_named_without_the_whole_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_fleet_spec(_file(tmp_path, '{"name": "gpt", "command": "COMMAND"}'))
    assert "fleet.machines is missing" in str(caught.value) and "COMMAND" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--forward-slots", "1000000000"], "are 4000000008 slots, and at most 2000000 can be drawn; give fewer"),
        (["--trace", "/proc/nope/trace.json"], "--trace /proc/nope/trace.json: can't be written (No such file"),
    ],
)
def test_a_schedule_that_can_not_be_drawn_or_written_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", "--stages", "2", "--micro-batches", "2", *options]) == 2
    assert words in capsys.readouterr().err
