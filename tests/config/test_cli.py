"""The root of ``ds_bamboo``, and ``ds_bamboo check``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import build_parser, main


def test_check_shows_all_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"bamboo": {"redundancy": {"mode": "eager"}}}')
    assert main(["check", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["redundancy"] == {
        "mode": "eager",
        "copies": 1,
        "losses_per_hour": None,
        "offload": "cpu",
        "overlap": False,
        "memory_limit_gigabytes": None,
    }
    assert shown["coordinator"]["lease_seconds"] == 3.0


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("{}", 0, "plain DeepSpeed"),
        ('{"bamboo": {"enabled": false}}', 0, "plain DeepSpeed"),
        ('{"bamboo": {"mode": "eager"}}', 1, "unknown key bamboo.mode"),
        ('{"bambo": {}}', 1, "did you mean 'bamboo'"),
        ('{"bamboo": {}, "comms_logger": {"enabled": true}}', 1, "comms_logger.enabled is true"),
        (
            '{"bamboo": {}, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true}}}}',
            1,
            "random_ltd.enabled is true",
        ),
    ],
)
def test_check_says_what_it_finds(
    text: str, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert main(["check", str(path)]) == code
    output = capsys.readouterr()
    assert expected in (output.err if code else output.out)


@pytest.mark.parametrize(
    ("section", "script", "expected"),
    [
        ({"faults": "FILE"}, None, "fault script FILE: can't be read (No such file or directory)"),
        ({"faults": "FILE"}, '[{"stage": 1}]', "2 problems in fault script FILE:\n  - fault 0: 'step' is missing"),
        ({"notices": {"source": "scripted", "script": "FILE"}}, None, "notices.script: 'FILE' can't be read"),
        (
            {"notices": {"source": "scripted", "script": "FILE"}},
            '[{"seconds": 3}]',
            "notices.script: notice 0: say when",
        ),
    ],
)
def test_check_reads_the_files_that_the_section_names(
    section: dict[str, object], script: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "script.json"
    if script is not None:
        file.write_text(script)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bamboo": section}).replace("FILE", str(file)))
    assert main(["check", str(path)]) == 1
    assert expected.replace("FILE", str(file)) in capsys.readouterr().err


NOWHERE = "event_log is '/proc/nope', and /proc can't be written to (No such file or directory); name a directory"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"event_log": "/proc/nope"}, [NOWHERE]),
        ({"checkpoint": {"dir": "/proc/nope"}}, [NOWHERE.replace("event_log", "checkpoint.dir")]),
        ({"event_log": "FILE/below"}, ["event_log is 'FILE/below', and FILE can't be written to (Not a directory)"]),
        (
            {"coordinator": {"endpoints": ["a:1"], "ca_cert": "/nope.pem"}},
            ["coordinator.ca_cert is '/nope.pem', which can't be read (No such file or directory); name a PEM file"],
        ),
        (
            {"coordinator": {"endpoints": ["a:1"], "ca_cert": "FILE"}, "event_log": "/proc/nope", "faults": "/nope"},
            ["3 problems in FILE:", "ca_cert is 'FILE', which is no PEM file", NOWHERE, "fault script /nope"],
        ),
    ],
)
def test_check_looks_at_files_and_at_the_event_log_as_the_job_will(
    section: dict[str, object], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bamboo": section}).replace("FILE", str(path)))
    assert main(["check", str(path)]) == 1
    error = capsys.readouterr().err
    for text in expected:
        assert text.replace("FILE", str(path)) in error


def test_check_prints_every_problem_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"redundancy": {"mod": "lazy"}, "checkpoint": {"keep": 3}, "event_log": "/proc/nope"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bamboo": section}))
    assert main(["check", str(path)]) == 1
    error = capsys.readouterr().err
    for text in ("4 problems", "bamboo.redundancy.mod", "checkpoint.keep is 3", "optimization.stage is 2", NOWHERE):
        assert text in error


MANY = [f"host{number}:2379" for number in range(100_000)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"bamboo": {"event_log": "\\ud800"}}', r"it has \ud800, which is half of a character"),
        ('{"\\udfff": 1, "bamboo": {}}', "half of a character"),
        ('{"bamboo": ' + '{"a": ' * 20_000 + "1" + "}" * 20_001, "is no valid DeepSpeed JSON"),
        ('{"bamboo": ' + "[" * 20_000 + "]" * 20_000 + "}", "is no valid DeepSpeed JSON"),
        (json.dumps({"bamboo": {"coordinator": {"endpoints": [*MANY, *MANY]}}}), "'host0:2379' is listed twice"),
        (json.dumps({"bamboo": {"coordinator": {"endpoints": [f"h{n}" for n in range(100_000)]}}}), "and 99990 more"),
        ("{" + ", ".join(f'"k{n % 50_000}": 1' for n in range(100_000)) + "}", "duplicate keys"),
        ('{"bamboo": {"coordinator": {"endpoints": ["h:' + "9" * 5000 + '"]}}}', "ports are 1 to 65535"),
    ],
    ids=["value", "key", "objects", "lists", "twice", "wrong", "keys", "port"],
)
def test_check_ends_soon_and_with_a_clear_word_whatever_it_reads(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    start = time.process_time()
    assert main(["check", str(path)]) == 1
    assert time.process_time() - start < 15
    assert expected in capsys.readouterr().err


def test_check_takes_many_endpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bamboo": {"coordinator": {"endpoints": [*MANY, "unix:/run/etcd"]}}}))
    start = time.process_time()
    assert main(["check", str(path)]) == 0
    assert time.process_time() - start < 15


def test_check_leaves_no_directory_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, there = tmp_path / "ds.json", tmp_path / "there"
    there.mkdir()
    for directory in (there, tmp_path / "runs" / "one"):
        path.write_text(json.dumps({"bamboo": {"event_log": str(directory)}}))
        assert main(["check", str(path)]) == 0, capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == [path, there]


def test_check_says_that_a_password_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is no error: the job may be started elsewhere."""
    path = tmp_path / "ds.json"
    etcd = {"endpoints": ["a:1"], "username": "u", "password_env": "SOME_PASSWORD"}
    path.write_text(json.dumps({"bamboo": {"coordinator": etcd}}))
    for value, told in (("", True), ("secret", False)):
        monkeypatch.setenv("SOME_PASSWORD", value)
        assert main(["check", str(path)]) == 0
        output = capsys.readouterr().out
        assert ("SOME_PASSWORD is not set here" in output) is told and "secret" not in output


def test_check_does_not_import_deepspeed_which_prints_warnings(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{'bamboo': {'seed': 1},}  # as DeepSpeed reads it")
    program = (
        "import sys; from deepspeed_bamboo.cli.main import main; main(sys.argv[1:]); "
        "sys.exit('deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, "check", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["seed"] == 1


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_command_that_is_not_installed_is_left_out() -> None:
    parser = build_parser(["deepspeed_bamboo.cli.check", "deepspeed_bamboo.no_such_cli"])
    assert parser.parse_args(["check", "file"]).configuration == "file"


def test_an_output_that_is_full_is_said_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bamboo": {}}', encoding="utf-8")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "deepspeed_bamboo.cli.main", "check", file],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.strip() == "ds_bamboo: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"zero_optimization": {"stage": 2}, "bamboo": {}}, "zero_optimization.stage is 2"),
        ({"zero_optimization": {"stage": 3}, "bamboo": {}}, "zero_optimization.stage is 3"),
        ({"bamboo": {"checkpoint": {"dir": "s3:/x"}}}, "write s3://bucket/prefix"),
    ],
)
def test_check_finds_what_the_start_would_refuse(
    tmp_path: Path, settings: dict[str, object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings))
    assert main(["check", str(file)]) == 1
    assert problem in capsys.readouterr().err


def test_a_file_of_a_fleet_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "configs" / "fleet" / "aws.json"
    assert main(["check", str(path)]) == 1
    told = capsys.readouterr().out
    assert "describes a fleet" in told and "ds_bamboo fleet --help" in told


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a command and of all commands below it."""
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from helps(command)


def test_every_help_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = list(helps(build_parser()))
    assert len(shown) > 12
    assert [line for text in shown for line in text.splitlines() if len(line) > 80] == []
    (run,) = (text for text in shown if text.startswith("usage: ds_bamboo run"))
    assert "(default: 10)" in run and "(default: 5)" in run
