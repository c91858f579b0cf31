"""Shadows that can't be made again are never counted as there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.errors import ShadowError
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError
from deepspeed_bamboo.runtime.recovery.redundancy_repair import RedundancyRepair

MEMBERS = ("a", "b", "c")


def worker_c(*, protected: Placement, **own: Any) -> Any:
    """One of three, whose stages have no shadows yet; ``own``: what a test needs of it besides."""
    parts: dict[str, Any] = {
        "links": SimpleNamespace(acquaint=lambda who: None, connect=lambda peers, with_lanes: None),
        "me": "c",
        "placement": Placement.initial(protected.grid, MEMBERS, protected=False),
        "protects": True,
        "protected": lambda members: protected,
        "activity": SimpleNamespace(index=4),
        "host": SimpleNamespace(shadows={}, owners=list),
        "is_reporter": False,
        "step": 5,
        "news": SimpleNamespace(),
    }
    return SimpleNamespace(**parts, **own)


def repair_of(worker: Any) -> RedundancyRepair:
    """Its part; copies come without any transfer."""
    return RedundancyRepair(
        worker,
        shadow_rebuild=SimpleNamespace(end=lambda: None),  # type: ignore[arg-type]
        transfer=SimpleNamespace(copy_shadows=lambda placement, shadows, label: ()),  # type: ignore[arg-type]
        last_loss=lambda: None,
    )


@pytest.mark.parametrize("problems", [(), ("0.1 (of b, its shadow on a): layer 3 has another class",)])
def test_a_shadow_that_is_not_what_its_owner_is_is_an_error_for_all(problems: tuple[str, ...]) -> None:
    grid, placed, events = Grid(1, 3), list[Placement](), list[str]()
    protected = Placement.initial(grid, MEMBERS)
    worker = worker_c(
        protected=protected,
        record=SimpleNamespace(members=MEMBERS),
        view=SimpleNamespace(place=placed.append),
        agree_on=lambda kind, value: {"a": problems, "b": (), "c": value()},
        log_event=lambda event, **fields: events.append(event),
        session=SimpleNamespace(worker="c"),
        leads=False,
    )
    repair = repair_of(worker)
    if problems:
        with pytest.raises(ShadowError, match="layer 3 has another class"):
            repair.repair()
        assert placed == []
    else:
        repair.repair()
        assert placed == [protected] and events == ["protected"]


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_loss_during_an_outage_at_the_boundary_is_not_the_scripts_error(lost_first: bool) -> None:
    """The next activity finds the new epoch."""
    grid, proposals = Grid(1, 3), list[EpochRecord]()
    protected = Placement.initial(grid, MEMBERS)
    record = EpochRecord(4, MEMBERS, protected, "loss", (), "a", 0.0)

    def with_retries(call: Callable[[], bool]) -> bool:
        if lost_first:
            raise EpochChangedError
        return call()

    def propose(made: EpochRecord, *, expected: int) -> bool:
        proposals.append(made)
        return True

    worker = worker_c(
        protected=protected,
        record=record,
        view=SimpleNamespace(place=lambda placement: setattr(worker, "placement", placement)),
        agree_on=lambda kind, value: {"a": (), "b": (), "c": value()},
        log_event=lambda event, **fields: None,
        session=SimpleNamespace(worker="c", with_retries=with_retries, coordinator=SimpleNamespace(propose=propose)),
        leads=True,
    )
    repair = repair_of(worker)
    repair.repair()
    assert worker.placement == protected
    assert [made.number for made in proposals] == ([] if lost_first else [5])


def test_that_one_worker_is_left_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    placement = Placement.initial(Grid(1, 2), ["a"])
    worker: Any = SimpleNamespace(
        links=SimpleNamespace(acquaint=lambda who: None),
        me="a",
        record=EpochRecord(4, ("a",), placement, "loss", ("b",), "a", 0.0),
        placement=placement,
        protects=True,
        protected=lambda members: placement,
        activity=SimpleNamespace(index=4),
        session=SimpleNamespace(worker="a", config=SimpleNamespace(waits_seconds=0.0)),
        is_reporter=True,
    )
    repair = RedundancyRepair(
        worker,
        shadow_rebuild=SimpleNamespace(end=lambda: None),  # type: ignore[arg-type]
        transfer=SimpleNamespace(),  # type: ignore[arg-type]
        last_loss=lambda: SimpleNamespace(activity=3, kind="train"),  # type: ignore[arg-type, return-value]
    )
    for _ in range(3):
        repair.repair()
    assert capsys.readouterr().err.count("one worker is left") == 1
