"""One worker's part in memory checkpoints, without the others."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.recovery import memory_rounds
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds

GRID = Grid(1, 3)


class Alone:
    """The leader of a job of ``members``, of whose stages nothing is copied, and whose rounds go well."""

    def __init__(
        self, *members: str, owners: tuple[str, ...] = ("a",), interval_seconds: float = 1e9, limit_bytes: int = 2**30
    ) -> None:
        self.step, self.channels, self.owners = 0, list[str](), owners
        sites = {name: Member(name, name, "unknown", "host", 1, 2, rank) for rank, name in enumerate(members)}
        links = SimpleNamespace(
            members={} if "a" in owners else sites,
            beside=self._beside,
            connect=lambda who: None,
            drain=lambda: None,
            close=lambda: None,
        )
        self.worker: Any = SimpleNamespace(
            me="a",
            leads=True,
            is_reporter=True,
            links=links,
            activity=SimpleNamespace(index=0),
            host=SimpleNamespace(save=lambda: None, replicas=list, description=lambda replica: None),
            session=SimpleNamespace(worker="a", interruption=SimpleNamespace(record=None, epoch=0)),
        )
        settings: Any = SimpleNamespace(
            memory_limit_gigabytes=limit_bytes / 2**30,
            memory_interval_seconds=interval_seconds,
            memory_copies=1,
            memory_megabytes_per_second=None,
        )
        self.memory = MemoryRounds(self.worker, settings)
        self.enter(*members)

    def enter(self, *members: str) -> None:
        """An epoch with these."""
        self.members, before = members, getattr(self.worker, "record", None)
        number = 0 if before is None else before.number + 1
        self.worker.placement = Placement.initial(GRID, self.owners)
        self.worker.record = EpochRecord(number, members, self.worker.placement, "loss", (), "a", 0.0)
        self.memory.interrupt()

    def iterate(self) -> bool:
        """One iteration; returns whether a round begins at its end."""
        self.step, self.worker.activity.index = self.step + 1, self.worker.activity.index + 1
        own = self.memory.contribution(step=self.step, wanted=True)
        note = own.get("memory", [None, None, None])
        others = {"memory": [None, note[1], note[2]]}
        before = self.memory.progress.step
        self.memory.note({member: own if member == "a" else others for member in self.members})
        began = before is None and self.memory.progress.step == self.step
        self.memory.take_if_due()
        for thread in threading.enumerate():
            if thread.name == "bamboo-memory":
                thread.join()  # memory.wait() leaves out a round that others may have given up
        return began

    def _beside(self, interruption: Any, *, name: str) -> Any:
        self.channels.append(name)
        return self.worker.links


def test_a_round_is_due_after_anybody_came_or_left() -> None:
    job = Alone("a", "b", "c")
    assert [job.iterate() for _ in range(4)] == [True, False, False, False]
    for members in (("a", "b"), ("a", "b", "d"), ("a", "d"), ("a", "e")):
        job.enter(*members)
        assert [job.iterate() for _ in range(4)] == [True, False, False, False], members


def test_channels_of_an_epoch_have_other_names_each_time_though_steps_come_again() -> None:
    job = Alone("a", "b", "c")
    job.iterate()
    for _ in range(2):  # the script loads an earlier state, in the same epoch
        job.memory.forget()
        job.step = 0
        assert job.iterate()
    assert len(set(job.channels)) == len(job.channels) == 3


def test_the_limit_binds_who_has_no_stage_of_its_own_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrived = list[str]()

    def receive_part(links: Any, owner: str, key: str) -> Any:
        arrived.append(key)
        part = SimpleNamespace(step=int(key.split("/")[0]), coordinate=Coordinate.parse(key.split("/")[1]), size=1000)
        return SimpleNamespace(part=part, is_of=lambda step, coordinate: True)

    monkeypatch.setattr(memory_rounds, "receive_part", receive_part)
    job = Alone("a", "b", "c", owners=("b", "c", "b"), interval_seconds=0.0, limit_bytes=2500)
    job.memory.share_of_time = math.inf
    assert job.iterate()
    assert arrived == ["1/0.0", "1/0.1"], "the second one is too much"
    for _ in range(8):
        job.iterate()
    assert job.memory.progress.complete == () and len(arrived) == 2
    told = capsys.readouterr().err
    assert told.count("no memory checkpoint is kept: two of them would take about") == 1


def test_one_slow_copy_delays_the_next_round_only_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Alone("a", "b", interval_seconds=5.0).memory
    for copying_seconds, interval_seconds in ((0.01, 5.0), (2.0, 200.0), (0.02, 5.0), (3.0, 300.0), (0.06, 6.0)):
        memory._set_interval(copying_seconds)
        assert memory._interval_seconds == pytest.approx(interval_seconds)
    assert capsys.readouterr().err.count("took 2.00 s, so the next one is made after 200 s, not 5") == 1
