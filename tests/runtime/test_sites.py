"""Slots that say different things of the zone that they are in: no reason to end a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.coordination.records import START
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration, expected_coordinate
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds

MEMBERS = ("a", "b", "c", "d")
RECORD = EpochRecord(0, MEMBERS, Placement.initial(Grid(1, 4), MEMBERS), START, (), "a", 0.0)


def members(other: str) -> dict[str, Member]:
    """Two nodes of two workers, of which one says that its zone is ``other``."""
    said = {"a": ("n0", "east"), "b": ("n0", other), "c": ("n1", "west"), "d": ("n1", "west")}
    return {name: Member(name, *where, "host", 1, 2, rank) for rank, (name, where) in enumerate(said.items())}


@pytest.mark.parametrize(("other", "told"), [("unknown", 0), ("east", 0), ("west", 1)])
def test_the_first_iteration_goes_on_and_a_real_contradiction_is_told_once(
    other: str, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    present = members(other)
    worker: Any = SimpleNamespace(
        me="a",
        session=SimpleNamespace(
            worker="a", stop_reason=None, present=present, draining={}, identity=SimpleNamespace(node="n0")
        ),
        record=RECORD,
        placement=RECORD.placement,
        confined=False,
        protects=True,
        micro_batches=4,
    )
    nothing: Any = None
    balancing: Any = SimpleNamespace(profile=None, memory=None, slow_workers=(), is_due=lambda record: False)
    steering: Any = SimpleNamespace(
        look=lambda present, waiting: None, put_off=lambda key: None, chosen=lambda found, sites: found.target
    )
    changes = Reconfiguration(
        worker, transfer=nothing, balancing=balancing, steering=steering, modes=nothing, world=nothing, known=lambda: {}
    )
    for _ in range(3):
        changes.wish()
    assert capsys.readouterr().err.count("workers on node n0 are in zone east and in zone west") == told


@pytest.mark.parametrize("other", ["unknown", "west"])
def test_a_worker_that_joins_and_copies_in_memory_bear_it_too(other: str) -> None:
    present = members(other)
    joiner = Member("e", "n1", other, "host", 1, 2, 4, joining=True)
    assert expected_coordinate(RECORD, present.values(), joiner) in RECORD.placement.grid
    worker: Any = SimpleNamespace(links=SimpleNamespace(members=present))
    settings: Any = SimpleNamespace(memory_limit_gigabytes=1.0, memory_interval_seconds=1.0, memory_copies=1)
    found = MemoryRounds(worker, settings).keepers(RECORD.placement, RECORD)
    assert all(len(chosen) == 1 for chosen in found.values())
