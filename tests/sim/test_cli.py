"""The command: output, options, and one line for every user error."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from deepspeed_bamboo.sim.build import available_policies
from deepspeed_bamboo.sim.cli import add_parser, main
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.report import print_table
from deepspeed_bamboo.sim.results import RunResult, Summary
from deepspeed_bamboo.sim.runner import run_one
from deepspeed_bamboo.sim.scenario import load_preset, load_scenario, parse_scenario, preset_names

from .common import REPOSITORY, preset_job

FIELDS = (
    "throughput_samples_per_second",
    "cost_dollars_per_hour",
    "value",
    "preemptions",
    "fatal_losses",
    "instance_lifetime_hours",
    "instances",
)
TRACE = "0,add,a\n0,add,b\n600000,remove,a\n"


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--preset", "bert-published", "--removal-probability", "0.1", "--seeds", "3", "--json", "-"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "bamboo-published"
    for name in FIELDS:
        assert set(result[name]) == {"mean", "ci95", "p5", "p95"}
        assert result[name]["p5"] <= result[name]["mean"] <= result[name]["p95"]
    assert result["throughput_samples_per_second"]["mean"] == pytest.approx((74.7146 + 77.4096 + 71.7049) / 3, rel=1e-4)


def test_several_policies_come_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = ["--preset", "bert", "--duration-hours", "1", "--json", str(target)]
    assert main(command) == 0
    assert list(json.loads(target.read_text())["policies"]) == available_policies(load_preset("bert"))
    assert "oracle" in capsys.readouterr().out


def test_no_figure_is_cut_in_a_pipe_or_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--preset", "bert", "--removal-probability", "0.1", "--seeds", "2", "--duration-hours", "1"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "…" not in table and all(heading in table for heading in ("samples/s", "redundant h", "lifetime h"))

    runs = [RunResult(*[scale * 61.7] * len(fields(RunResult))) for scale in (1, 4)]
    summary = Summary("deepspeed-bamboo-eager", tuple(runs))
    screen = Console(width=80, force_terminal=True, file=io.StringIO())
    print_table([summary], title="t", console=screen)
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "…" not in shown and "value" in shown and "lifetime h" not in shown and screen.width == 80


def test_the_subcommand_registers_itself() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["simulate", "--preset", "bert", "--duration-hours", "0.5", "--policy", "oracle"])
    assert arguments.run(arguments) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "bert", "--removal-probability", "1.5"], "market.removal_probability is 1.5"),
        (["--preset", "bert", "--capacity", "0"], "--capacity: market.capacity is 0"),
        (["--preset", "bart"], "preset 'bart' is unknown; there are alexnet, bert, bert-p3-published"),
        (["--preset", "bert", "--policy", "hope"], "policy 'hope' is unknown"),
        (["--preset", "bert", "--seeds", "0"], "--seeds 0: at least 1"),
        (["--preset", "bert", "--segment", "1-2"], "give --trace as well"),
        (["--preset", "bert", "--trace", "TRACE", "--segment", "late"], "FROM-TO in hours"),
        (["--preset", "bert", "--trace", "TRACE", "--segment", "0.1-1"], "ends after the trace's end, 0.166 h"),
        (["--preset", "bert", "--duration-hours", "1e300"], "less than or equal to 87600"),
        (["--preset", "bert", "--trace", "TRACE", "--removal-probability", "0.5"], "which machines go; give one"),
        (["--preset", "bert", "--trace", "TRACE", "--seeds", "3"], "happens one way"),
        (["--preset", "vgg19"], "VGG-19 has no number of steps"),
        (["--preset", "bert", "--trace", "absent.csv"], "absent.csv: can't be read"),
        (["--predictors"], "give --trace as well"),
        (["--predictors", "--trace", "TRACE", "--horizons", "0"], "whole numbers from 1"),
        (["--predictors", "--trace", "TRACE", "--preset", "bert"], "--predictors and --preset: predictors look at the"),
        (["--predictors", "--trace", "TRACE", "--seeds", "3"], "--predictors and --seeds 3: predictors look at the"),
        (["--predictors", "--trace", "TRACE", "--bulk-minutes", "3"], "--predictors and --bulk-minutes: predictors"),
        (["--preset", "bert", "--horizons", "5"], "--horizons 5 are of --predictors"),
        (["--preset", "bert", "--seeds", "1000000000"], "at most 100000"),
        ([], "give --preset NAME or --scenario FILE"),
    ],
)
def test_user_errors_are_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    assert main([str(trace) if option == "TRACE" else option for option in options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n "preset": "bert",\n "market": {\n  "capacity": 0\n }\n}', "s.json:4: market.capacity is 0"),
        ('{\n "preset": "bert",\n "market": {"removal_probability": -1}\n}', "s.json:3: market.removal_probability"),
        (
            '{\n "preset": "bert",\n "markets": {}\n}',
            "s.json:3: markets is no key; did you mean 'market'? Valid are: desc",
        ),
        (
            '{\n "preset": "bert",\n "market": {"capacty": 10,\n "zoness": []}\n}',
            "s.json:3: market.capacty is no key; did you mean 'capacity'? Valid are: capacity, removal_probability, ",
        ),
        ('{\n "preset": "bert",\n "market": {"capacty": 10,\n "zoness": []}\n}', "s.json:4: market.zoness is no key"),
        (
            '{"preset": "bert",\n"policies": {\n"live": {"copie": 2}}}',
            "s.json:3: policies.live.copie is no key; did you",
        ),
        ('{\n "preset": "bert",\n}', "s.json:3: not JSON"),
        ('{\n "preset": "bert",\n "model": {"profile": "p.json"}\n}', "a model has a table or a profile"),
        ("[]", "s.json:1: a scenario is a JSON object"),
        ('{"preset": "bort"}', "preset 'bort' is unknown"),
        (
            '{"preset": "bert",\n "policies": {\n"varuna": {"least_stages": 24, "most_stages": 8}}}',
            "s.json:3: policies.varuna: Value error, least_stages 24 is more than most_stages 8",
        ),
        ('{"preset": "bert", "policies": {"proactive": {"least_stages": 25}}}', "25 is more than most_stages 24"),
        (
            '{"preset": "bert", "model": {"table": [{"pipelines": 4, "stages": 12, "milliseconds": 1},'
            ' {"pipelines": 4, "stages": 12, "milliseconds": 2}]}}',
            "two rows of the grid 4 x 12; keep one",
        ),
        ('{"preset": "bert", "market": {"capacity": 1000000000}}', "less than or equal to 1000000"),
    ],
)
def test_scenario_errors_name_file_line_and_rule(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert words in str(caught.value)


def test_a_model_without_a_table_for_the_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"preset": "bert", "policies": {"bamboo": {"stages": 8}}}', encoding="utf-8")
    assert main(["--scenario", str(path), "--policy", "bamboo"]) == 2
    error = capsys.readouterr().err
    assert "BERT-large has no step time for the grid 1x8 (pipelines x stages): known are 1x12" in error


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    scenario = parse_scenario(
        '{"model": {"name": "m", "samples_per_step": 8, "profile": "nowhere.json"},'
        ' "run": {"duration_hours": 1}, "policies": {}}',
        where="here",
    )
    with pytest.raises(ScenarioError, match=r"nowhere\.json: can't be read"):
        build_job(scenario, folder=tmp_path)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs_every_policy(name: str) -> None:
    preset = load_preset(name)
    assert preset.model.source
    job = build_job(preset.model_copy(update={"run": preset.run.model_copy(update={"duration_hours": 1.5})}))
    for policy in available_policies(preset):
        assert run_one(job, policy=policy, seed=2).samples > 0, policy


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "sim").glob("*.json")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    if path.name.endswith(".profile.json"):
        given = json.loads(path.read_text())
        assert given.get("layers") or given["forward"]
        return
    scenario = load_scenario(path)
    short = scenario.model_copy(update={"run": scenario.run.model_copy(update={"duration_hours": 0.5})})
    job = build_job(short, folder=path.parent)
    assert run_one(job, policy=available_policies(scenario)[-1], seed=1).cost_dollars > 0


def test_the_simulator_needs_neither_torch_nor_deepspeed() -> None:
    heavy = "('torch', 'deepspeed', 'statsmodels', 'matplotlib')"
    code = f"import sys, deepspeed_bamboo.sim.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("matplotlib", ("--preset", "bert", "--duration-hours", "2", "--plot", "p.png"), "plot"),
        ("statsmodels", ("--predictors",), "predict"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_computed(
    module: str,
    options: tuple[str, ...],
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*options, "--trace", str(trace)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    # Not the package's name: no index has it, and a stranger may register it there.
    assert f"{module} is not installed" in output.err
    assert output.err.endswith(f"""in the directory of this project's source, pip install ".[{extra}]" installs it\n""")


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra plot")
    target = tmp_path / "plot.png"
    command = ["--preset", "bert", "--duration-hours", "2", "--policy", "bamboo", "--policy", "oracle"]
    assert main([*command, "--plot", str(target)]) == 0
    assert target.read_bytes()[:4] == b"\x89PNG"
    assert main([*command, "--plot", str(tmp_path / "plot.nothing")]) == 2


def test_a_grid_larger_than_the_fleet_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--preset", "bert", "--capacity", "3", "--duration-hours", "5", "--policy", "bamboo"]
    assert main([*command, "--policy", "oracle"]) == 0
    shown = capsys.readouterr().out
    assert "bamboo never trained: with 2." in shown and "too few for its grid, or a run is too short" in " ".join(
        shown.split()
    )
    assert "oracle never trained" not in shown
    assert main([*command, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["notes"]) == 1
    assert result["dollars_per_million_samples"]["mean"] is None  # JSON has no infinity


def test_a_run_too_short_for_a_step_is_no_want_of_machines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--preset", "bert", "--capacity", "400", "--duration-hours", "0.01", "--policy", "bamboo"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "it completed no step in 0.01 h." in shown and "a run is too short for boot, start and a step" in shown


def test_steps_of_less_than_a_millisecond_take_one() -> None:
    quick = [{"pipelines": 4, "stages": 12, "milliseconds": 0.4}]
    job = preset_job("bert", model__table=quick, policies__on_demand__step_milliseconds=1.49, run__duration_hours=0.1)
    seconds = 360 - 45
    assert run_one(job, policy="on-demand", seed=1).steps == seconds * 500
    assert run_one(job, policy="bamboo", seed=1).steps <= seconds * 1000


def test_the_columns_that_people_decide_by_fit_80_columns() -> None:
    runs = [RunResult(*[scale * 5.17] * len(fields(RunResult))) for scale in (1, 4)]
    screen = Console(width=80, force_terminal=True, file=io.StringIO())
    print_table([Summary("deepspeed-bamboo-eager", tuple(runs))], title="t", console=screen)
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert all(heading in shown for heading in ("value", "hours", "dollars"))
    assert all(len(Text.from_ansi(line).plain) <= 80 for line in shown.splitlines())


def test_bands_are_where_nine_of_ten_runs_lie() -> None:
    runs = [RunResult(*[float(scale)] * len(fields(RunResult))) for scale in range(101)]
    assert Summary("p", tuple(runs)).band("value") == pytest.approx((5.0, 95.0))
    assert Summary("p", tuple(runs[:1])).band("value") is None


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (2, "the least and the most of 2 runs [0.00, 1.00]"),
        (19, "the least and the most of 19 runs [0.00, 18.00]"),
        (20, "where nine of ten runs lie [0.95, 18.05]"),
        (1, ""),
    ],
)
def test_of_few_runs_the_least_and_the_most_are_shown(count: int, shown: str) -> None:
    runs = [RunResult(*[float(scale)] * len(fields(RunResult))) for scale in range(count)]
    screen = Console(width=80, force_terminal=True, file=io.StringIO())
    print_table([Summary("p", tuple(runs))], title="t", console=screen)
    assert isinstance(screen.file, io.StringIO)
    text = Text.from_ansi(screen.file.getvalue()).plain
    caption, _, band = shown.partition(" [")
    assert (caption in text and f"[{band}" in text) if shown else "in brackets" not in text


def test_losses_of_many_on_top_of_a_trace_differ_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("".join(f"0,add,n{n}\n" for n in range(24)) + "7200000,remove,n1\n")
    command = ["--preset", "bert", "--trace", str(trace), "--policy", "checkpoint", "--seeds", "4", "--json", "-"]
    assert main([*command, "--bulk-minutes", "30"]) == 0
    found = json.loads(capsys.readouterr().out)["preemptions"]
    assert found["p5"] < found["p95"]
    assert main(command) == 2


def test_machines_beyond_the_capacity_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    # The fourth comes at the instant at which one goes: there are three at a time.
    trace.write_text("0,add,a\n0,add,b\n0,add,c\n300000,remove,c\n300000,add,d\n600000,remove,a\n")
    options = ["--preset", "bert-published", "--trace", str(trace)]
    assert main([*options, "--capacity", "2"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "up to 3 machines at a time, and the capacity is 2: up to 1 are not used (--capacity 3 uses all)" in told
    assert main([*options, "--capacity", "3"]) == 0
    assert "not used" not in capsys.readouterr().out


def test_time_of_which_trace_and_prices_say_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n7200000,add,b\n")
    (tmp_path / "prices.csv").write_text("seconds,dollars_per_hour\n0,1.0\n3600,2.0\n")
    (tmp_path / "s.json").write_text('{"preset": "bert", "market": {"price_history": "prices.csv"}}')
    options = ["--scenario", str(tmp_path / "s.json"), "--trace", str(tmp_path / "trace.csv"), "--policy", "oracle"]
    assert main([*options, "--duration-hours", "9"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the trace ends after 2.00 h, and the run after 9.00 h: the machines that are there" in told
    assert "the last price in prices.csv begins at hour 1.00 of the run, and stays to its end, hour 9.00" in told
    assert main([*options, "--segment", "0-1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
    assert main([*options, "--capacity", "1", "--segment", "0.5-2", "--json", "-"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note[:9] for note in notes] == ["the trace", "the last "] and "hour 0.50 of the run" in notes[1]


@pytest.mark.parametrize(("seconds", "notice"), [(120, ""), (0, ""), (0, "100,notice,m,z\n")])
def test_who_does_not_listen_to_notices_is_named(
    seconds: int, notice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"preset": "bert", "market": {"notice_seconds": seconds}}))
    (tmp_path / "t.csv").write_text(f"seconds,change,node,zone\n0,add,m,z\n{notice}900,remove,m,z\n")
    command = ["--scenario", str(tmp_path / "s.json"), "--trace", str(tmp_path / "t.csv"), "--json", "-"]
    for policies, named in ((("varuna", "deepspeed-bamboo"), True), (("deepspeed-bamboo", "oracle"), False)):
        assert main([*command, *(part for policy in policies for part in ("--policy", policy))]) == 0
        said = [line for line in json.loads(capsys.readouterr().out)["assumed"] if "notices are used by" in line]
        assert bool(said) is (named and bool(seconds or notice))
        assert all("alone: varuna lose a warned machine" in line for line in said)


def test_the_list_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60 and not [line for line in lines if line != line.rstrip()]
    assert [line.partition(":")[0] for line in lines if not line.startswith("  ")] == list(preset_names())
