"""One worker's part in memory checkpoints, without the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds

GRID = Grid(1, 3)


class Alone:
    """The leader of a job of ``members``, of whose stages nothing is copied, and whose rounds go well."""

    def __init__(self, *members: str, interval_seconds: float = 1e9) -> None:
        self.step, self.channels = 0, list[str]()
        links = SimpleNamespace(
            members={}, beside=self._beside, connect=lambda who: None, drain=lambda: None, close=lambda: None
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
            memory_limit_gigabytes=1.0,
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
        self.worker.placement = Placement.initial(GRID, ["a"])
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
        self.memory.wait()
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
