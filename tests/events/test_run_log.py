"""The training script's side: with the plugin's engine, and with DeepSpeed's own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from deepspeed_bamboo.eventlog.files import read_events
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.eventlog.run_log import RunLog
from deepspeed_bamboo.progress import Progress


class StockEngine:
    def __init__(self, rank: int = 0) -> None:
        self.global_rank = rank
        self.global_steps = 7


class BambooEngine(StockEngine):
    """What BambooPipelineEngine offers to scripts."""

    def __init__(self) -> None:
        super().__init__(rank=2)
        self.is_reporter = True
        self.epoch = 3
        self.event_log = EventLog(None, "w2")
        self.barriers = 0

    def log_event(self, event: str, **fields: Any) -> None:
        self.event_log.log(event, epoch=self.epoch, step=self.global_steps, **fields)

    def state_digest(self) -> str:
        return "abc"

    def barrier(self) -> None:
        self.barriers += 1


def test_with_stock_the_script_logs_steps_itself(tmp_path: Path) -> None:
    waited: list[int] = []
    for rank in (0, 1):
        log = RunLog(StockEngine(rank), directory=tmp_path, barrier=lambda: waited.append(1))
        log.step(6, loss=0.5, samples=8, seconds=0.1)
        assert log.finish(0.5) is None
        assert log.is_reporter == (rank == 0)
        assert (log.epoch, log.news()) == (0, [])
    assert waited == [1, 1]
    for rank in (0, 1):
        step, finished = read_events(tmp_path / f"events-rank{rank}.jsonl")
        assert (step["event"], step["step"], step["loss"], step["samples"]) == ("step", 6, 0.5, 8)
        assert (finished["event"], finished["step"], finished["digest"]) == ("finished", 7, None)


def test_with_stock_every_line_names_the_run_that_the_script_gives(tmp_path: Path) -> None:
    log = RunLog(StockEngine(0), directory=tmp_path, run=lambda: "stock@1")
    log.step(6, loss=0.5, samples=8, seconds=0.1)
    assert log.run == "stock@1"
    assert [event["run"] for event in read_events(tmp_path / "events-rank0.jsonl")] == ["stock@1"]


def test_with_bamboo_the_engine_logs_and_the_script_adds_the_end(tmp_path: Path) -> None:
    engine = BambooEngine()
    log = RunLog(engine, directory=tmp_path)
    log.step(6, loss=0.5, samples=8, seconds=0.1)
    assert log.finish(0.5) == "abc"
    (event,) = engine.event_log.recent()[1]
    assert (event["event"], event["loss"], event["digest"]) == ("finished", 0.5, "abc")
    assert engine.barriers == 1
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_took_no_step_reports_no_loss() -> None:
    engine = BambooEngine()
    assert RunLog(engine, directory=None).finish(None) == "abc"
    assert engine.event_log.recent()[1] == []
    assert engine.barriers == 1


def test_each_failover_is_news_once() -> None:
    engine = BambooEngine()
    log = RunLog(engine, directory=None)
    pause = {"detect": 0.0125, "abort": 0.1, "total": 0.75}
    engine.log_event("failover", lost=["0.2", "0.3"], pause_seconds=pause)
    engine.log_event("notice")
    assert log.news() == ["step 7: failover, 0.2, 0.3 lost and taken over; epoch 3"]
    assert log.news() == []


def test_without_a_terminal_progress_is_lines() -> None:
    stream = io.StringIO()
    with Progress(total=40, stream=stream) as progress:
        for done in range(1, 41):
            news = ["step 5: failover of 0.2"] if done == 5 else []
            progress.show(done=done, loss=1 / done, samples_per_second=64.4, epoch=int(done > 5), news=news)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 0  loss 1.0000  64 samples/s  epoch 0  1/40 done"
    assert lines.count("step 5: failover of 0.2") == 1
    assert lines[-1] == "step 39  loss 0.0250  64 samples/s  epoch 1  40/40 done"
    assert len(lines) == 22


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_a_bar_under_the_news() -> None:
    stream = Terminal()
    with Progress(total=4, stream=stream) as progress:
        progress.show(done=1, loss=2.5, samples_per_second=64, epoch=0, news=["step 0: failover of 0.2"])
    assert "step 0: failover of 0.2" in stream.getvalue()
    assert "loss 2.5000" in stream.getvalue()


def test_a_worker_that_reports_nothing_draws_nothing() -> None:
    stream = Terminal()
    with Progress(total=4, stream=stream):
        pass
    assert stream.getvalue() == ""
