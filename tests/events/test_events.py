"""The event log: what survives a kill, a full disk and a merge."""

from __future__ import annotations

import json
import math
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.errors import ConfigError, EventLogError
from deepspeed_bamboo.eventlog.files import merge_event_files, merge_events, read_events
from deepspeed_bamboo.eventlog.log import EventLog, event_file_name

WRITER = """
import sys
from deepspeed_bamboo.eventlog.log import EventLog
log = EventLog(sys.argv[1], "w0")
step = 0
while True:
    log.log("step", epoch=0, step=step, loss=step / 3, samples=8, seconds=0.1)
    step += 1
    if step == 100:
        print("ready", flush=True)
"""


def step_event(t: float, step: int, loss: float = 1.5, **more: Any) -> dict[str, Any]:
    return {"t": t, "epoch": 0, "step": step, "event": "step", "loss": loss, "samples": 8, "seconds": t} | more


def test_an_event_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "w1", clock=lambda: 12.5)
    log.log("failover", epoch=1, step=3, coordinates=["0.2"], pause_seconds={"total": 0.25})
    assert read_events(tmp_path / "events-w1.jsonl") == [
        {
            "t": 12.5,
            "worker": "w1",
            "epoch": 1,
            "step": 3,
            "event": "failover",
            "coordinates": ["0.2"],
            "pause_seconds": {"total": 0.25},
        }
    ]


def test_sigkill_loses_nothing_and_tears_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    raw = (tmp_path / "events-w0.jsonl").read_bytes()
    events = read_events(tmp_path / "events-w0.jsonl")
    assert raw.endswith(b"\n")
    assert len(events) >= 100
    assert [event["step"] for event in events] == list(range(len(events)))


@given(st.floats())
def test_floats_read_back_bitwise(value: float) -> None:
    log = EventLog(None, "w0")
    log.log("step", epoch=0, step=0, loss=value)
    back = log.recent()[1][0]["loss"]
    assert math.isnan(value) if math.isnan(back) else struct.pack("d", back) == struct.pack("d", value)


def test_a_tensor_of_one_element_and_a_path_can_be_logged(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.1

    log = EventLog(None, "w0")
    log.log("checkpoint", epoch=0, step=0, loss=Scalar(), path=tmp_path)
    assert log.recent()[1][0] | {"t": 0} == {
        "t": 0,
        "worker": "w0",
        "epoch": 0,
        "step": 0,
        "event": "checkpoint",
        "loss": 0.1,
        "path": str(tmp_path),
    }


def test_unknown_events_and_values_are_refused() -> None:
    log = EventLog(None, "w0")
    with pytest.raises(ValueError, match="did you mean 'failover'"):
        log.log("fail_over", epoch=0, step=0)
    with pytest.raises(TypeError, match="object"):
        log.log("step", epoch=0, step=0, loss=object())


def test_recent_gives_only_what_is_new() -> None:
    log = EventLog(None, "w0")
    log.log("joined", epoch=1, step=0)
    position, first = log.recent()
    log.log("notice", epoch=1, step=1)
    _, second = log.recent(position)
    assert [event["event"] for event in first] == ["joined"]
    assert [event["event"] for event in second] == ["notice"]


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "w0")

    def write(number: int) -> None:
        for step in range(200):
            log.log("step", epoch=number, step=step, padding="x" * 300)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(tmp_path / "events-w0.jsonl")
    for number in range(4):
        assert [event["step"] for event in events if event["epoch"] == number] == list(range(200))


def test_a_restarted_worker_continues_its_file_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events-w0.jsonl"
    EventLog(tmp_path, "w0").log("joined", epoch=0, step=0)
    with path.open("a") as file:
        file.write('{"t": 1, "ev' + "x" * 9000)
    EventLog(tmp_path, "w0").log("finished", epoch=0, step=9)
    assert [event["event"] for event in read_events(path)] == ["joined", "finished"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events-w0.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path, "w0")
    for step in range(3):
        log.log("step", epoch=0, step=step)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert len(log.recent()[1]) == 3


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/events-w0\.jsonl"):
        EventLog(tmp_path / "file", "w0")


def test_closing_twice_and_logging_afterwards_is_harmless(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "w0")
    log.close()
    log.close()
    log.log("joined", epoch=0, step=0)
    assert read_events(tmp_path / "events-w0.jsonl") == []


def test_worker_names_become_file_names() -> None:
    assert event_file_name("10.0.0.1:5/a") == "events-10.0.0.1_5_a.jsonl"


class TestReading:
    def test_a_torn_last_line_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "events-w0.jsonl"
        path.write_text('{"t": 1, "event": "joined"}\n{"t": 2, "ev')
        assert read_events(path) == [{"t": 1, "event": "joined"}]

    @pytest.mark.parametrize("line", ['{"t": ', "3", ""])
    def test_another_broken_line_is_named(self, line: str, tmp_path: Path) -> None:
        path = tmp_path / "events-w0.jsonl"
        path.write_text('{"t": 1}\n' + line + '\n{"t": 2}\n')
        with pytest.raises(EventLogError, match=r"events-w0\.jsonl, line 2"):
            read_events(path)


class TestMerging:
    def test_one_step_event_per_step_in_order_of_time(self) -> None:
        merged = merge_events(
            {
                "a": [step_event(1.0, 0), step_event(3.0, 1), {"t": 3.5, "event": "failover", "step": 1}],
                "b": [step_event(1.1, 0), {"t": 2.0, "event": "failover", "step": 1}, step_event(2.9, 1)],
            }
        )
        assert [(event["t"], event["event"]) for event in merged] == [
            (1.0, "step"),
            (2.0, "failover"),
            (2.9, "step"),
            (3.5, "failover"),
        ]

    @given(st.lists(st.lists(st.integers(0, 20), unique=True).map(sorted), max_size=4))
    def test_no_step_is_lost_or_doubled(self, workers: list[list[int]]) -> None:
        files = {
            f"w{number}": [step_event(step + number / 8, step, loss=step / 7) for step in steps]
            for number, steps in enumerate(workers)
        }
        merged = merge_events(files)
        assert [event["step"] for event in merged] == sorted({step for steps in workers for step in steps})

    @pytest.mark.parametrize(
        "other", [{"loss": math.nextafter(1.5, 2)}, {"samples": 9}, {"loss": -1.5}, {"loss": math.nan}]
    )
    def test_disagreement_is_an_error(self, other: dict[str, Any]) -> None:
        with pytest.raises(EventLogError, match=r"step 4.*in a.*in b"):
            merge_events({"a": [step_event(1.0, 4)], "b": [step_event(2.0, 4) | other]})

    def test_a_loss_that_is_no_number_agrees_with_itself(self) -> None:
        merged = merge_events({"a": [step_event(1.0, 4, math.nan)], "b": [step_event(2.0, 4, math.nan)]})
        assert len(merged) == 1

    def test_different_digests_are_an_error(self) -> None:
        files = {
            name: [{"t": 1, "event": "finished", "step": 9, "loss": 1.0, "digest": f"d{name}"}] for name in ("a", "b")
        }
        with pytest.raises(EventLogError, match="digest of finished 9"):
            merge_events(files)

    def test_merged_file_holds_one_run_and_replaces_the_last(self, tmp_path: Path) -> None:
        for run, loss in (("r1", 1.0), ("r2", 2.0)):
            for worker in ("w0", "w1"):
                EventLog(tmp_path, worker, run=run).log("step", epoch=0, step=0, loss=loss, samples=8)
        with pytest.raises(EventLogError, match="two runs share"):
            merge_event_files(tmp_path)
        for run, loss in (("r1", 1.0), ("r2", 2.0)):
            merged = merge_event_files(tmp_path, run=run)
            assert merged == tmp_path / "events.jsonl"
            assert [json.loads(line)["loss"] for line in merged.read_text().splitlines()] == [loss]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "events-w0.jsonl",
            "events-w1.jsonl",
            "events.jsonl",
        ]

    def test_nothing_to_merge_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(EventLogError, match="no events"):
            merge_event_files(tmp_path)
