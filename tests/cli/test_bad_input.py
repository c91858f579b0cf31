"""What people give by mistake is refused in words: files that are no text, sections that are no objects, no value."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.asking import agreed
from deepspeed_bamboo.cli.main import build_parser, main
from deepspeed_bamboo.cli.plan_memory import asked_for, batch_in, estimate
from deepspeed_bamboo.config.requirements import settings_problems
from deepspeed_bamboo.config.sections import zero_stage
from deepspeed_bamboo.doctor.losses import check_losses
from deepspeed_bamboo.doctor.machine import Gpu, ThisMachine
from deepspeed_bamboo.doctor.memory import check_memory
from deepspeed_bamboo.doctor.settings import check_settings
from deepspeed_bamboo.doctor.subject import Host, ModelFacts, Subject
from deepspeed_bamboo.elastic.command_line import parse_command_line
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.sim.cost import ProfileError, profile_from_json
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.measured import measured_profile
from deepspeed_bamboo.sim.scenario import parse_scenario

BAD_FILES = {
    "bytes": b"\x80\xff\x00",
    "deep": b"[" * 100_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "zeros": b"\0\0",
    "list": b"[1]",
    "text": b'"x"',
    "empty": b"",
    "quote": b'w0,"' + b"x" * 200_000 + b'"\n',
}
PLAN = ["plan", "--pipelines", "1", "--stages", "2", "--nodes"]
READERS = [
    ["check"],
    ["doctor", "--config"],
    ["doctor", "--hostfile"],
    PLAN,
    [*PLAN, "NODES", "--current"],
    [*PLAN, "NODES", "--profile"],
    [*PLAN, "NODES", "--model", "gpt", "--config"],
    ["simulate", "--scenario"],
    ["simulate", "--preset", "bert", "--trace"],
    ["simulate", "--preset", "bert", "--profile"],
    ["advise", "--scenario"],
    ["advise", "--preset", "bert", "--profile"],
    ["compare", "x"],
    ["fleet", "up", "--dry-run"],
    ["profile"],
    ["stop", "--yes", "--deepspeed_config"],
]


@pytest.fixture
def nodes(tmp_path: Path) -> str:
    path = tmp_path / "nodes"
    path.write_text("w0,n0,a\nw1,n1,b\n")
    return str(path)


@pytest.mark.parametrize("kind", [*BAD_FILES, "folder"])
def test_a_file_that_is_none_of_that_kind_is_refused_in_words(
    kind: str, nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_bamboo.cli.doctor.examine", lambda subject: ())
    path = tmp_path / "bad"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(BAD_FILES[kind])
    for reader in READERS:
        if kind == "empty" and reader[-1] in ("check", "--config"):
            continue  # an empty file is an empty configuration
        command = [*(nodes if word == "NODES" else word for word in reader), str(path)]
        assert main(command) in (1, 2), command
        assert capsys.readouterr().err.startswith("ds_bamboo"), command
    with pytest.raises(ConfigError):
        FaultScript.load(path)


@pytest.mark.parametrize("value", ["9" * 5000, "10000", "0", "٤"])
def test_a_host_has_a_number_of_slots(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"n0 slots={value}\n")
    assert main(["doctor", "--hostfile", str(path)]) == 1
    said = capsys.readouterr().err
    assert "write NAME slots=N, with N from 1 to 9999" in said and len(said) < 500


class _Machine(ThisMachine):
    def gpus(self) -> tuple[Gpu, ...]:
        return (Gpu("x", 80 << 30, 0),)


SECTIONS = ("bf16", "fp16", "optimizer", "zero_optimization", "torch_autocast", "comms_logger", "data_efficiency")
NO_SECTIONS: tuple[Any, ...] = (None, True, "auto", [], -1, 1e308, {"params": None}, {"params": [1]}, {"enabled": []})
MODEL = ModelFacts("m", 4, (10, 10), (1, 1))


@pytest.mark.parametrize("name", SECTIONS)
def test_whatever_stands_in_place_of_a_section_is_no_traceback(name: str) -> None:
    for value in NO_SECTIONS:
        settings = {name: value, "train_micro_batch_size_per_gpu": 1}
        subject = Subject(_Machine(), settings=settings, hosts=(Host("a", 1), Host("b", 1)), stages=2, model=MODEL)
        for check in (check_losses, check_memory, check_settings):
            list(check(subject))
        estimate(MODEL, settings, pipelines=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bf16": True}, 'bf16 is True, and a section is an object; write {"enabled": true}, or leave it out'),
        ({"fp16": None}, "fp16 is None, and a section is an object"),
        ({"optimizer": "Adam"}, 'optimizer is \'Adam\', and a section is an object; write {"type": "Adam"}'),
        ({"optimizer": {"params": [1]}}, "optimizer.params is [1], and must be an object"),
        ({"zero_optimization": 1}, 'zero_optimization is 1, and a section is an object; write {"stage": 1}'),
    ],
)
def test_a_section_that_is_no_object_is_named(
    settings: Mapping[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**settings, "bamboo": {}}))
    assert main(["check", str(path)]) == 1
    assert words in capsys.readouterr().err
    arguments = argparse.Namespace(config=str(path), model="gpt", device_gib=None, stages=2)
    with pytest.raises(ConfigError) as caught:
        asked_for(arguments, ())
    assert words in str(caught.value)


def test_what_deepspeed_takes_besides_objects_is_taken() -> None:
    assert list(settings_problems({"bf16": None, "zero_optimization": True})) == []
    assert [zero_stage({"zero_optimization": old}) for old in (True, False)] == [1, 0]


@pytest.mark.parametrize("value", [0, -1, True, "auto", [], 10**40])
def test_a_micro_batch_has_samples(value: object) -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu is .*; write a whole number from 1"):
        estimate(MODEL, {"train_micro_batch_size_per_gpu": value}, pipelines=1)


def test_the_batch_is_filled_in_as_deepspeed_does() -> None:
    """64 samples in 2 pipelines, of 2 micro-batches each: 16 in each, whether that is written out or not."""
    given = {"train_batch_size": 64, "gradient_accumulation_steps": 2}
    written = {**given, "train_micro_batch_size_per_gpu": 16}
    assert batch_in(given, pipelines=2) == batch_in(written, pipelines=2) == (16, 2)
    assert estimate(MODEL, given, pipelines=2).activations == (16, 16)
    assert batch_in({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, pipelines=2) == (4, 8)
    assert batch_in({}, pipelines=2) == (1, 1)
    with pytest.raises(ConfigError, match="train_batch_size 7, .* do not fit --pipelines 2; train_batch_size must be"):
        batch_in({"train_batch_size": 7, "gradient_accumulation_steps": 2}, pipelines=2)


def test_plan_says_where_its_micro_batches_are_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # of a long path the middle is left out
    nodes, profile = Path("nodes.csv"), Path("profile.json")
    nodes.write_text("worker,node\na,1\nb,2\nc,3\n")
    passes = {"forward": [1.0, 1.0], "backward": [2.0, 2.0], "speeds": {}, "handover": 0.0}
    profile.write_text(json.dumps({**passes, "pipelines": 1, "micro_batches": 4}))
    grid = ["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "2"]
    for options, said in (
        ([], "with 8 micro-batches in an iteration (assumed)"),
        (["--profile", str(profile)], f"with 4 micro-batches in an iteration ({profile})"),
        (["--profile", str(profile), "--micro-batches", "3"], "with 3 micro-batches in an iteration (--micro-batches)"),
    ):
        assert main([*grid, *options]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert said in shown
        if options:  # the row of a: both stages on one worker, then on two again; 3 s each and the pipeline's fill
            count = int(said.split()[1])
            assert f"({3 * 2 * count:.3g} s)" in shown and f"({3 * (count + 1):.3g} s)" in shown


def test_in_mode_off_no_stage_moves_after_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("worker,node\n" + "".join(f"w{n},n{n}\n" for n in range(8)))
    grid = ["plan", "--nodes", str(nodes), "--pipelines", "2", "--stages", "4", "--zero", "0"]
    rows = {}
    for mode in ("off", "lazy"):
        main([*grid, "--mode", mode])
        lines = capsys.readouterr().out.splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("loss of worker"))
        rows[mode] = [line.split() for line in lines[start + 1 : start + 9]]
    assert all(row[-1] == row[-2] and float(row[-1]) > 1 for row in rows["off"]), rows
    assert any(float(row[-1]) < float(row[-2]) for row in rows["lazy"]), rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pipelines", "100000", "--stages", "100000"], "are 10000000000 coordinates, and at most 10000"),
        (["--pipelines", "9" * 30, "--stages", "2"], "coordinates, and at most 10000 can be planned; give fewer"),
        (["--pipelines", "1", "--stages", "2", "--micro-batches", "0"], "--micro-batches 0: give a number from 1"),
        (["--pipelines", "1", "--stages", "2", "--micro-batches", "10001"], "give a number from 1 to 10000"),
    ],
)
def test_a_plan_has_a_size(options: list[str], words: str, nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nodes", nodes, *options]) == 2
    assert words in capsys.readouterr().err


def test_other_numbers_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages", "100000", "--micro-batches", "100000"]) == 2
    assert "at most 100000 can be drawn; give fewer" in capsys.readouterr().err
    assert main(["doctor", "--stages", "9" * 30]) == 1
    assert "give a number from 1 to 10000" in capsys.readouterr().err
    for minutes in ("1e-300", "1e300"):
        assert main(["simulate", "--preset", "bert", "--duration-hours", "1", "--bulk-minutes", minutes]) == 2
        assert f"market.bulk_minutes is {float(minutes)}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e10", "-1", "nan"])
def test_a_pause_that_no_clock_holds_is_refused_at_once(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", f"--pause-seconds={text}", "--", "true"])
    assert f"{text}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["drain", "n0", "--deadline-seconds"], ["profile", "x", "--lease-seconds"]])
def test_no_duration_overflows_a_clock(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "1e300"])
    assert f"argument {command[-1]}: 1e300 must be at most 1000000 (eleven days)" in capsys.readouterr().err


MEASURED = {"forward": [1, 2], "backward": [2, 3], "pipelines": 1, "micro_batches": 2, "samples_per_step": 4}
LAYER = {"forward_seconds": 1, "backward_seconds": 2, "parameters": 3, "output_bytes": 4}
LAYERED = {"name": "x", "layers": [LAYER], "micro_batch_samples": 1, "link_bytes_per_second": 1}


@pytest.mark.parametrize("value", [None, "x", [], {}, -1, [None], 10**400])
def test_a_wrong_value_in_a_profile_is_refused(value: object) -> None:
    for key in (*MEASURED, "fixed_seconds", "handover", "costs"):
        if (key, value) not in (("costs", {}), ("micro_batches", -1), ("samples_per_step", -1), ("pipelines", -1)):
            _refused_or_read({**MEASURED, key: value})
    for key in LAYERED:
        if key != "name":
            with pytest.raises(ProfileError):
                profile_from_json(json.dumps({**LAYERED, key: value}))
    for key in LAYER:
        with pytest.raises(ProfileError):
            profile_from_json(json.dumps({**LAYERED, "layers": [{**LAYER, key: value}]}))


def _refused_or_read(data: dict[str, Any]) -> None:
    try:
        measured_profile(data, name="x")
    except ProfileError as error:
        assert str(error).startswith(("x", "profile x"))


@pytest.mark.parametrize("kind", ["profile", "failover", "step"])
def test_an_event_without_what_readers_need_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events-0.jsonl").write_text(json.dumps({"t": 1.0, "step": 0, "event": kind}) + "\n")
    for command in [["profile", str(tmp_path)], *([["compare", *[str(tmp_path)] * 2]] if kind != "profile" else [])]:
        assert main(command) == 1
        said = capsys.readouterr().err
        assert str(tmp_path) in said or "no event `profile`" in said


def test_half_a_character_can_be_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes"
    path.write_text('[["w\\ud800", "n0"], ["w1", "n1"]]')
    assert main([*PLAN, str(path)]) == 0
    assert "w\\ud800" in capfd.readouterr().out


def test_a_scenario_says_the_line() -> None:
    with pytest.raises(ScenarioError, match=r"here:2: not JSON \(.*, line 2\); correct it"):
        parse_scenario('{"preset":\n}', where="here")


# Verbs of `fleet` have a parser of their own, where names come from AWS.
def _options(parser: argparse.ArgumentParser, *path: str) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                if name != "fleet":
                    yield from _options(below, *path, name)
        elif action.nargs is None and action.choices is None:
            yield (*path, action.metavar or action.dest), action


def test_every_option_with_a_value_refuses_an_empty_one() -> None:
    found = list(_options(build_parser()))
    assert len(found) > 60
    for name, action in found:
        assert callable(action.type), f"{name} takes any text, also an empty one"
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            action.type("")


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize(
    "command",
    [
        ["stop", "--yes", "--endpoints"],
        ["stop", "--yes", "--job"],
        ["status", "--deepspeed_config"],
        ["drain", "--yes"],
        ["compare", "x"],
        ["simulate", "--preset", "bert", "--segment"],
        ["advise", "--preset", "bert", "--machines"],
    ],
)
def test_an_empty_value_is_not_as_good_as_none(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, value])
    assert ended.value.code == 2
    assert "it is empty; is the variable set that it comes from?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--job", "--bamboo_config"])
def test_a_launch_refuses_an_empty_value_too(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command_line([option, "", "train.py"])
    assert f"argument {option}: it is empty" in capsys.readouterr().err


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def _typed(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal(io.BytesIO(text), encoding="utf-8"))


@pytest.mark.parametrize(
    ("typed", "answer"),
    [(b"y\n", True), (b" YES\n", True), (b"n\n", False), (b"\n", False), (b"", False), (b"\xff\n", False)],
)
def test_only_yes_is_yes(typed: bytes, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _typed(typed, monkeypatch)
    assert agreed("End them all?", otherwise=ConfigError("no terminal")) is answer


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.StringIO("y\n")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ConfigError, match="no terminal"):
            agreed("End them all?", otherwise=ConfigError("no terminal"))


def test_all_commands_ask_at_one_place() -> None:
    """What ``input`` raises at Ctrl-D is caught there."""
    package = Path(str(sys.modules["deepspeed_bamboo"].__file__)).parent
    files = itertools.chain((package / "cli").rglob("*.py"), (package / "sim").rglob("*.py"))
    assert [path.name for path in files if " input(" in path.read_text()] == ["asking.py"]
