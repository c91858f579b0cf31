"""Survivors get each other's reports: all the same, whoever waits for whom, and each hears of one thing only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_bamboo.coordination import EpochRecord, JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import Change
from deepspeed_bamboo.core.consensus import Report
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, Interruption
from deepspeed_bamboo.runtime.comm.retry import with_retries
from deepspeed_bamboo.runtime.recovery import reports as module
from deepspeed_bamboo.runtime.recovery.reports import exchange_reports, packed, unpacked

WORKERS = ("w0", "w1", "w2", "w3")


def epoch(number: int) -> EpochRecord:
    placement = Placement.initial(Grid(1, 4), WORKERS)
    return EpochRecord(number, WORKERS, placement, "", ("gone",), "w0", 0.0)


class Survivor:
    """One worker's side of it, in a thread: what of a session the exchange needs."""

    def __init__(self, store: MemoryStore, worker: str, report: Report) -> None:
        self.worker, self._report = worker, report
        self.coordinator = JobCoordinator(store, job="job")
        self.interruption = Interruption()
        self.interruption.enter(epoch(7))
        self.heard: list[Change] = []
        self._watch = self.coordinator.watch(self._on_change)
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive(), f"{self.worker} still waits"
        self._watch.stop()
        return self.result

    def with_retries(self, call: Callable[[], Any]) -> Any:
        return with_retries(call, interruption=self.interruption)

    def published(self, number: int) -> dict[str, Any]:
        return {change.worker: change.value for change in self.heard if change.epoch == number}

    def _on_change(self, change: Change) -> None:
        if change.kind == "progress":
            self.heard.append(change)
        self.interruption.notify()

    def _run(self) -> None:
        try:
            self.result = exchange_reports(self._report, epoch(7), session=self)  # type: ignore[arg-type]
        except EpochChangedError as error:
            self.result = error


def report(worker: str, rounds: tuple[str, ...] = ()) -> Report:
    stage = int(worker[1:])
    return Report(5, "train", rounds=rounds, progress={Coordinate(0, stage): CoordinateProgress(forwards=stage)})


def survivors(rounds: Callable[[str], tuple[str, ...]] = lambda worker: ()) -> tuple[MemoryStore, list[Survivor]]:
    store = MemoryStore()
    return store, [Survivor(store, worker, report(worker, rounds(worker))) for worker in WORKERS]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_everybody_gets_all_reports_and_hears_of_one_thing(order: tuple[int, ...]) -> None:
    _, all_of_them = survivors()
    for index in order:
        all_of_them[index].start()
        time.sleep(0.02)
    expected = {worker: report(worker) for worker in WORKERS}
    assert [list(survivor.end().items()) for survivor in all_of_them] == [list(expected.items())] * 4
    assert all(len(survivor.heard) <= 1 for survivor in all_of_them), "it grows with the workers"


def test_who_missed_an_agreement_gets_its_text_from_the_keeper() -> None:
    _, all_of_them = survivors(lambda worker: ("agreed",) if worker in ("w1", "w2") else ())
    for survivor in all_of_them:
        survivor.start()
    results = {survivor.worker: survivor.end() for survivor in all_of_them}
    for worker in ("w0", "w3"):
        assert results[worker]["w1"].rounds == ("agreed",), worker
    assert results["w2"]["w1"].rounds == ("",)


@pytest.mark.parametrize("missing", ["w0", "w2"])
def test_all_waits_end_with_a_new_epoch(missing: str) -> None:
    _, all_of_them = survivors()
    waiting = [survivor for survivor in all_of_them if survivor.worker != missing]
    for survivor in waiting:
        survivor.start()
    time.sleep(0.05)
    for survivor in waiting:
        assert survivor.result is None, "it did not wait for the missing one"
        survivor.interruption.announce_epoch(epoch(8))
    assert [type(survivor.end()) for survivor in waiting] == [EpochChangedError] * 3


@pytest.mark.parametrize("last", ["w0", "w1"])
def test_what_the_coordinator_lost_is_handed_in_again(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN_SECONDS", 0.05)
    store, all_of_them = survivors()
    early = [survivor for survivor in all_of_them if survivor.worker != last]
    for survivor in early:
        survivor.start()
    deadline = time.monotonic() + 20
    while len(all_of_them[0].coordinator.reports(7)) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    store.delete_prefix("/")
    (late,) = (survivor for survivor in all_of_them if survivor.worker == last)
    late.start()
    assert all(set(survivor.end()) == set(WORKERS) for survivor in all_of_them)


def test_a_thousand_reports_fit_into_one_value() -> None:
    progress = CoordinateProgress(loaded=8, activations_received=7, forwards=6, gradients_received=5, backwards=4)
    everybodys = {
        f"node-{n // 8}-worker-{n}": Report(
            123456, "train", progress={Coordinate(n // 10, n % 10): progress}, redundant={Coordinate(0, n): progress}
        ).to_json()
        for n in range(1000)
    }
    value = packed(everybodys)
    assert unpacked(value) == everybodys
    assert len(value["zlib"]) < 100_000  # etcd takes 1.5 MB
