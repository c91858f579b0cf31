"""A trace drives a job on a fleet: what is left of the trace, the fleet's own account, and that nothing is lost."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from threading import Event

import pytest

from deepspeed_bamboo.cloud.aws import AwsMetadata
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.traces import read_trace, segment
from deepspeed_bamboo.sweep.spot_market import SpotMarket
from deepspeed_bamboo.sweep.trace_run import sped_up, thinned, with_notices
from tests.scripts.loading import SCRIPTS, load_script
from tests.sim.common import published_trace

EXAMPLE = SCRIPTS.parent / "configs" / "sim" / "example-trace.csv"
SCRIPT = load_script("trace_drive")


def most_at_once(events: tuple[MachineEvent, ...]) -> int:
    """After what happens at one instant."""
    live: dict[int, int] = {}
    count = 0
    for event in events:
        count += (event.change is Change.ADD) - (event.change is Change.REMOVE)
        live[event.at_milliseconds] = count
    return max(live.values())


def test_one_in_four_of_the_p3_traces_machines_is_a_fleet_of_eight() -> None:
    trace = read_trace(published_trace("aws-p3-us-east.csv"), generator=random.Random(1))
    whole = segment(trace, from_hours=4.95, to_hours=8.0).events
    kept = thinned(whole, one_in=4, capacity=8)
    assert sum(event.at_milliseconds == 0 for event in kept) == 8 == most_at_once(kept)
    gone = [sum(event.change is Change.REMOVE for event in events) for events in (whole, kept)]
    assert 0.2 < gone[1] / gone[0] < 0.3
    fast = sped_up(kept, times=60)
    assert max(event.at_milliseconds for event in fast) <= 3.05 * 60_000
    noticed = with_notices(fast, share=0.5, milliseconds=2000, seed=1)
    assert set(fast) <= set(noticed)
    removed = {event.node: event.at_milliseconds for event in fast if event.change is Change.REMOVE}
    came = {event.node: event.at_milliseconds for event in fast if event.change is Change.ADD}
    warned = [event for event in noticed if event.change is Change.NOTICE]
    assert 0 < len(warned) < len(removed)
    for event in warned:
        assert event.at_milliseconds == max(came[event.node] + 1, removed[event.node] - 2000)


def test_a_trace_with_notices_keeps_them() -> None:
    events = read_trace(EXAMPLE, generator=random.Random(1)).events
    assert with_notices(events, share=1.0, milliseconds=2000, seed=1) == events


def test_what_a_fleet_costs_is_what_its_machines_cost_while_they_were_there() -> None:
    with SpotMarket(machines=3) as market:
        began, price = time.time(), market.dollars_per_hour
        before = market.dollars_at(began)
        first = market.instances
        assert len(first) == 3
        fourth = market.grant()
        market.take(first[0])
        assert market.control.status("trace").running == 3
        metadata = AwsMetadata(base_url=market.notices(fourth)["base_url"])
        assert metadata.identify(Event(), timeout_seconds=5.0).instance == fourth
        assert metadata.poll(Event()) == []
        market.notice(fourth, seconds=2.0)
        assert [notice.kind for notice in metadata.poll(Event())] == ["preemption"]
        later = time.time() + 3600.0
        # EC2 keeps whole seconds.
        assert market.dollars_at(later) - before == pytest.approx(3 * price, abs=4 * price / 3600 * 5)
    assert price > 0.0


@pytest.mark.sweep
def test_a_trace_with_notices_drives_a_job_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How well it is predicted is for a quiet machine, and no part of this test."""
    its = ["--trace", str(EXAMPLE), "--calibrate", "0.48-0.9", "--hours", "0.48-0.9", "--one-in", "2"]
    SCRIPT.main([*its, "--policies", "fixed", "--rounds", "1", "--folder", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "figures.json").read_text())
    for name in ("calibration", "fixed 1"):
        assert results[name]["problems"] == [], shown
        assert results[name]["machines"] == {"add": 1, "notice": 2, "remove": 3}
        assert results[name]["losses"] >= 1 and results[name]["dollars"] > 0.0
    assert results["fixed 1"]["predicted_samples_per_dollar"] > 0.0
