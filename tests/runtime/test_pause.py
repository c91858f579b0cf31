"""How long a loss has held the job up: one figure for all who speak of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deepspeed_bamboo.runtime.recovery.regroup import PAUSE, agreed_pause
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train
from tests.runtime.test_losses import kill


def test_the_line_of_who_took_over_and_the_jobs_event_name_the_same_pause(jobs: Jobs, tmp_path: Path) -> None:
    training = Training("pause", 3, steps=3, faults=[kill(1, 0, 2, "backward", 1)], bamboo={"event_log": str(tmp_path)})
    result = jobs.run(train, world=3, training=training)
    assert result.codes == [0, 0, -9], result.transcript()
    lines = [line for file in tmp_path.glob("events-*.jsonl") for line in file.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    (run,) = {event.get("run") for event in events}
    assert run and "@20" in run, "all workers name the same run"
    (loss,) = [event for event in events if event["event"] == "loss_of_node"]
    (taker,) = [event for event in events if event["event"] == "failover" and event["taken_over"]]
    assert loss["worker"] != taker["worker"], "another worker reports"
    assert loss["pause_seconds"] == taker["pause_seconds"]
    said = re.findall(r"took 0\.2 over from \S+, pause (\S+) s", result.transcript())
    assert said == [f"{loss['pause_seconds']['total']:.2f}"], result.transcript()


def test_the_pause_is_that_of_who_took_over_or_else_the_longest() -> None:
    def handed_in(total: float, *, took_over: bool = False, epoch: int = 2) -> dict[str, object]:
        return {PAUSE: (epoch, took_over, {"total": total}), "losses": []}

    longest = {"w0": handed_in(0.07), "w1": handed_in(10.5), "w3": {"losses": []}}
    assert agreed_pause(longest, epoch=2) == {"total": 10.5}
    of_three = {**longest, "w4": handed_in(10.01, took_over=True), "w5": handed_in(9.0, took_over=True)}
    assert agreed_pause(of_three, epoch=2) == {"total": 10.01}
    assert agreed_pause(of_three, epoch=3) is None, "handed in before a further loss"
    assert agreed_pause({"w0": {}}, epoch=2) is None
