"""What ``ds_bamboo status`` shows: exact screens, whatever the width, and what it leaves out where there is no room."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from deepspeed_bamboo.cli.status_screen import LEAST_CELLS, news, screen
from deepspeed_bamboo.cli.status_watch import PlainLines, Screen
from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.core.grid import Grid
from tests.cli.views import EVENTS, NOW, SIX, STEP, VIEWS, view_of

GOLDEN = Path(__file__).parent / "golden"
CASES = [(name, cells) for name in VIEWS for cells in (80, 160)] + [("troubles", 40), ("wide_unicode", 24)]


def test_second_shadows_stand_beside_the_first() -> None:
    shown = screen(view_of([f"w{i}" for i in range(4)], grid=Grid(1, 4), copies=2), cells=160)
    assert any(line.split() == ["pipeline", "0", "1/3+4", "2/1+4", "3/1+2", "4/2+3"] for line in shown)
    assert any("1/2: worker 1 hosts it, 2 has its shadow, 2+3: both have one" in line for line in shown)


@pytest.mark.parametrize(("name", "cells"), CASES)
def test_the_screen_is_the_golden_one(name: str, cells: int) -> None:
    golden = (GOLDEN / f"{name}_{cells}.txt").read_text(encoding="utf-8").splitlines()
    assert screen(VIEWS[name], cells=cells) == golden


@given(name=st.sampled_from(sorted(VIEWS)), cells=st.integers(1, 200), rows=st.none() | st.integers(1, 80))
def test_no_line_is_wider_than_the_terminal_and_no_screen_higher(name: str, cells: int, rows: int | None) -> None:
    lines = screen(VIEWS[name], cells=cells, rows=rows)
    assert max(map(cell_len, lines)) <= max(cells, LEAST_CELLS)
    assert rows is None or len(lines) <= rows


@given(text=st.text(max_size=60), cells=st.integers(20, 100))
def test_whatever_others_have_written_stays_on_its_line(text: str, cells: int) -> None:
    event = {"t": NOW, "event": text, "step": 1, "reason": text, "workers": text, "pause_seconds": text}
    view = view_of(SIX, grid=Grid(1, 6), events=[event, {**event, "event": "loss_of_node"}], reason=text, detail=text)
    view = replace(view, progress={**(view.progress or {}), "slow": text, "mode": text, "seconds": text, "loss": text})
    for line in [*screen(view, cells=cells), *news(replace(view, epoch=9), view)]:
        assert all(char.isprintable() for char in line), line
    assert json.loads(json.dumps(view.to_json()))["reason"] == text


def test_where_there_is_no_room_for_all_workers_those_in_trouble_are_shown() -> None:
    names = [f"w{number}" for number in range(40)]
    view = view_of(names, grid=Grid(1, 40), states={"w37": "silent", "w31": "leaving"})
    shown = screen(view, cells=100, rows=24)
    assert len(shown) <= 24 and shown[-1].startswith("and ") and shown[-1].endswith(" more workers")
    assert [line.split()[1] for line in shown if "silent" in line or "leaving" in line][-2:] == ["w31", "w37"]
    assert screen(view, cells=100, rows=3)[-1].startswith("… "), "and what else is cut off is counted"


def test_without_a_terminal_nothing_is_left_out() -> None:
    lines = "\n".join(screen(VIEWS["troubles"]))
    for text in (
        *SIX,
        "ip-10-0-1-17",
        "us-east-1a",
        "10.0.1.17",
        "20005",
        "10005",
        "mode eager",
        "0.4",
        "pause 0.21 s",
    ):
        assert text in lines
    assert "…" not in lines


def test_json_has_what_the_screen_has() -> None:
    seen = json.loads(json.dumps(VIEWS["troubles"].to_json()))
    assert (seen["state"], seen["grid"], seen["mode"], seen["slow"]) == ("running", [1, 5], "eager", {SIX[2]: 0.5})
    assert seen["failovers"] == [
        {"step": 398, "workers": ["ip-10-0-0-17-2-0"], "lost": ["0.2"], "pause_seconds": 0.21, "age_seconds": 125.0}
    ]
    assert (seen["checkpoint"]["step"], seen["checkpoint"]["age_seconds"], seen["checkpoint"]["overdue"]) == (
        *(300, 1300.0),
        True,
    )
    assert seen["workers"][0]["hosts"] == ["0.0"] and seen["workers"][0]["pid"] == 20_000
    assert seen["workers"][5]["state"] == "standby" and seen["draining"][0]["node"] == "ip-10-0-1-17"
    assert seen["hangs"][SIX[1]]["seconds"] == 64.2 and seen["progress"]["step"] == 412


def test_a_log_gets_what_is_new() -> None:
    before = view_of(SIX, grid=Grid(1, 6), events=EVENTS[:2], progress=STEP)
    assert news(None, before) == screen(before)
    assert news(before, replace(before, seen_t=NOW + 1, progress_seconds=4.0)) == []
    stepped = view_of(SIX, grid=Grid(1, 6), events=EVENTS[:2], progress={**STEP, "step": 413})
    assert news(before, stepped) == ["step 413, loss 2.2513, 0.125 s a step, mode eager, 3 s ago"]
    lost = view_of(SIX, grid=Grid(1, 6), events=EVENTS[:3], progress={**STEP, "step": 414}, epoch=4, epoch_seconds=1.0)
    lines = news(stepped, lost)
    assert lines[1] == "epoch 4, since 1 s: lost w2"
    assert lines[-1] == "step 398: lost ip-10-0-0-17-2-0 with 0.2, pause 0.21 s"
    assert news(lost, replace(lost, state="finished"))[0].startswith("job gpt: finished")


UNAVAILABLE = CoordinatorUnavailable(endpoints=["e:1"], tried_seconds=0.1, reason="gone")


def test_an_outage_is_said_once_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    lines.show(VIEWS["dead"])
    capsys.readouterr()
    for seconds in (0.0, 1.0):
        lines.away(seconds, UNAVAILABLE)
    lines.show(VIEWS["dead"])
    assert capsys.readouterr().out.count("etcd does not answer") == 1


@pytest.mark.parametrize("cells", [80, 160])
def test_the_live_screen_fits_the_terminal_and_outlives_an_outage(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(cells))
    monkeypatch.setenv("LINES", "30")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=cells, height=30, color_system=None)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        shown = Screen(live)
        shown.show(VIEWS["published_grid"])
        shown.away(7.0, UNAVAILABLE)
    drawn = out.getvalue().splitlines()
    assert any(line.startswith("etcd has not answered for 7 s") for line in map(_without_codes, drawn))
    expected = screen(VIEWS["published_grid"], cells=cells, rows=29)
    assert [_without_codes(line).rstrip() for line in drawn][: len(expected)] == [line.rstrip() for line in expected]


def _without_codes(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).replace("\r", "")


def test_losses_stay_among_the_events_that_are_told() -> None:
    from deepspeed_bamboo.coordination.job import JobCoordinator
    from deepspeed_bamboo.coordination.memory import MemoryStore
    from deepspeed_bamboo.runtime.job.status import StatusTeller
    from tests.coordination.helpers import wait_until

    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    teller = StatusTeller(job, worker="w0")
    teller.note("loss_of_node", step=1, reporter=True, fields={"workers": ["w1"], "lost": ["0.1"]})
    for step in range(2, 14):
        teller.note("reconfigured", step=step, reporter=True, fields={"reason": f"joined: w{step}", "seconds": 0.1})
    teller.note(
        "step", step=14, reporter=True, fields={"loss": 1.0, "seconds": 0.1, "mode": "lazy", "slow": {"w3": 0.5}}
    )
    wait_until(lambda: job.status() is not None, what="the status")
    teller.close()
    status = job.status() or {}
    assert [event["step"] for event in status["events"]] == [1, *range(6, 14)]
    assert (status["mode"], status["slow"]) == ("lazy", {"w3": 0.5})
    store.close()
