"""Grids as text, the numbers under them, the Chrome trace, and the command that shows them."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.schedule import add_parser
from deepspeed_bamboo.config.section import RedundancyConfig
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_iteration
from deepspeed_bamboo.core.render import bubble_share, grid_rows, text_grid
from deepspeed_bamboo.core.timeline import length
from deepspeed_bamboo.core.trace import chrome_trace
from deepspeed_bamboo.core.verify import verify
from tests.core.interruptions import initial


def lines(text: str) -> list[str]:
    return text.strip("\n").splitlines()


def test_grid_of_a_fresh_iteration() -> None:
    execution = verify(plan_iteration(initial(1, 2), micro_batches=3))
    assert lines(text_grid(execution.timeline, placement=initial(1, 2))) == lines("""
        0  1  2  3  4  5  6  7  8  9 10 11
0.0 w0 F0 F1  .  . B0  - F2 B1  -  . B2  -
0.1 w1  . F0 B0  - F1 B1  - F2 B2  -  .  .
""")


def test_redundant_passes_stand_beside_what_they_use() -> None:
    execution = verify(plan_iteration(initial(1, 2), micro_batches=1, mode="full"))
    assert lines(text_grid(execution.timeline, placement=initial(1, 2))) == lines(
        """
        0  1  2  3  4  5
0.0 w0 F0 f0 b0  - B0  -
0.1 w1 f0 F0 B0  - b0  -
"""
    )


def test_shadow_apart_and_lodger_get_rows_of_their_own() -> None:
    grid = Grid(1, 2)
    placement = Placement.of(grid, owners=dict.fromkeys(grid, "a"), shadows={Coordinate(0, 1): "b"})
    execution = verify(plan_iteration(placement, micro_batches=1, mode="eager"))
    assert lines(text_grid(execution.timeline, placement=placement)) == lines("""
        0  1  2  3  4  5
0.0 a  F0  .  .  . B0  -
0.1 a   . F0 B0  -  .  .
~0.1 b  . f0  .  .  .  .
""")


def test_only_the_pipelines_and_slots_asked_for_are_drawn() -> None:
    placement = initial(2, 2)
    execution = verify(plan_iteration(placement, micro_batches=1))
    assert lines(text_grid(execution.timeline, placement=placement, pipelines=[1], first_slot=4)) == lines("""
        4  5
1.0 w1 B0  -
1.1 w3  .  .
""")


def test_bubble_share_is_the_known_one() -> None:
    execution = verify(plan_iteration(initial(1, 4), micro_batches=8))
    assert bubble_share(execution.timeline, workers=4) == pytest.approx(3 / 11)  # (P - 1) / (M + P - 1)
    assert bubble_share((), workers=4) == 0.0


def test_rows_hold_every_pass_once() -> None:
    placement = initial(2, 3)
    execution = verify(plan_iteration(placement, micro_batches=4, mode="eager"))
    rows = grid_rows(execution.timeline, placement=placement)
    assert [label for label, _ in rows][:2] == ["0.0 w0", "0.1 w2"]
    assert sum(len(passes) for _, passes in rows) == 2 * 3 * 4 * 3


def test_trace_has_a_bar_for_every_pass_and_a_name_for_every_track() -> None:
    grid = Grid(1, 2)
    placement = Placement.of(grid, owners=dict.fromkeys(grid, "a"), shadows={Coordinate(0, 1): "b"})
    execution = verify(plan_iteration(placement, micro_batches=2, mode="eager"))
    events = json.loads(json.dumps(chrome_trace(execution.timeline, placement=placement)))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "a (0.0 0.1)", 1: "b (shadows only)"}
    bars = [event for event in events if event["ph"] == "X"]
    assert sorted(event["cat"] for event in bars) == sorted(["FNC", "BNC"] * 4 + ["FRC"] * 2)
    assert max(event["ts"] + event["dur"] for event in bars) == length(execution.timeline) * 1000
    instants = [event["name"] for event in events if event["ph"] == "i" and event["tid"] == 1]
    assert instants[:2] == ["LOAD 0.1 0", "RECV_ACTIVATION 0.1 0 shadow"]


def schedule(*options: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["schedule", *options])
    status = args.run(args)
    assert isinstance(status, int)
    return status


def test_command_draws_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--stages", "4", "--micro-batches", "6", "--mode", "eager") == 0
    out = capsys.readouterr().out
    assert "0.0 w0 F0 F1 F2 F3 f0 f1 f2 f3  .  . B0" in out
    assert "bubbles: 33.3% of 4 x 27 slots without redundancy" in out
    assert "FRC in bubbles: 17 of 24 (70.8%); the others are left out" in out
    assert "extra time: 0 slots (0.0%)" in out
    assert "program of" not in out


def test_command_draws_the_mode_that_is_the_configurations_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--stages", "4", "--micro-batches", "6") == 0
    assert f"6 micro-batches, mode {RedundancyConfig().mode};" in capsys.readouterr().out


def test_command_states_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--stages", "1", "--pipelines", "2", "--micro-batches", "3", "--mode", "full") == 0
    out = capsys.readouterr().out
    assert "FRC in bubbles: 0 of 6 (0.0%)" in out
    assert "BRC in bubbles: 0 of 6 (0.0%)" in out
    assert "extra time: 9 slots (100.0%) if what overlaps hides nothing" in out


def test_command_shows_the_recovery_of_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "3", "--micro-batches", "4", "--mode", "lazy", "--lost", "1", "--at", "7")
    assert schedule(*options, "--programs") == 0
    out = capsys.readouterr().out
    assert "lost at slot 7: 0.1. The rest of the iteration, its slots counted from there:" in out
    assert "0.1: worker w0 takes over from w1; it repeats 2 of 2 forwards and 1 of 1 backwards" in out
    undisturbed, rest = out.split("lost at slot 7")
    assert "program of w1:" in undisturbed
    assert "program of w0:\n  SEND_ACTIVATION 0.0 0, SEND_ACTIVATION 0.0 1, " in rest
    assert "program of w1" not in rest
    assert "extra time: " in rest
    assert schedule(*options) == 0
    assert "program of" not in capsys.readouterr().out


def test_a_loss_without_a_place_is_one_in_the_middle_of_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--stages", "4", "--micro-batches", "8", "--lost", "2") == 0
    out = capsys.readouterr().out
    assert "lost at slot 16: 0.2." in out
    assert "it repeats 5 of 5 forwards and 3 of 3 backwards" in out


def test_command_writes_trace_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="requires matplotlib, the plot extra")
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    options = ("--stages", "3", "--micro-batches", "2", "--lost", "2", "--at", "4")
    assert schedule(*options, "--trace", str(trace), "--picture", str(picture)) == 0
    cats = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {op.value for op in (Op.FNC, Op.BNC, Op.STEP)} <= cats
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_without_matplotlib_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert schedule("--stages", "2", "--micro-batches", "2", "--picture", str(tmp_path / "p.png")) == 2
    assert 'pip install ".[plot]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stages", "0"), "at least 1 pipeline and 1 stage"),
        (("--stages", "2", "--lost", "2"), "--lost 2 is no stage; they are 0..1"),
        (
            ("--stages", "2", "--lost", "1", "--at", "99"),
            "--at 99 is outside the iteration; its slots are 0..14 (15: after the last)",
        ),
        (("--stages", "2", "--at", "3"), "--at 3 without --lost"),
        (("--stages", "2", "--overlap"), "--overlap changes the schedule of mode eager only, and this is lazy"),
        (("--stages", "2", "--mode", "full", "--offload", "none"), "--offload none changes the schedule of mode eager"),
        (("--stages", "2", "--lost", "0", "--lost", "1"), "no live worker holds 0.0, 0.1"),
        (("--stages", "3", "--mode", "off", "--lost", "1"), "no live worker holds 0.1; mode off keeps no shadows"),
        (("--stages", "2", "--backward-slots", "0"), "at least 1 slot"),
    ],
)
def test_command_refuses_what_cannot_be(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schedule("--micro-batches", "4", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (("--mode", "eager", "--overlap"), "FRC in bubbles: 24 of 24 (100.0%); the others overlap"),
        (("--mode", "eager", "--offload", "recompute"), "FRC in bubbles: 14 of 24 (58.3%); the others are left out"),
        (("--mode", "lazy"), "4 x 27 slots without redundancy"),
    ],
)
def test_command_takes_the_settings_of_the_configuration(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], share: str
) -> None:
    assert schedule("--stages", "4", "--micro-batches", "6", *options) == 0
    assert share in capsys.readouterr().out


def test_command_draws_a_single_worker_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("--stages", "1", "--micro-batches", "2", "--mode", "eager") == 0
    assert "extra time: 0 slots" in capsys.readouterr().out


def test_without_shadows_no_take_over_is_drawn_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "--stages", "4", "--micro-batches", "4", "--mode", "off", "--lost", "1"]
    assert main(command) == 2
    assert "no live worker holds 0.1; mode off keeps no shadows" in capsys.readouterr().err
    assert main([*command, "--pipelines", "2"]) == 2
    capsys.readouterr()
    assert main([*command, "--pipelines", "2", "--zero", "0"]) == 0
    assert "0.1: worker w3 takes over from w2" in capsys.readouterr().out
