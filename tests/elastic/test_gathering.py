"""What agents do about slots that are not there before the job has its first epoch, without processes or clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import AgentRecord, JobFailure
from deepspeed_bamboo.elastic.decisions import (
    Changed,
    CheckSlots,
    EndWorker,
    Event,
    Fail,
    FailureRecorded,
    LauncherGone,
    Leave,
    LossSettled,
    Say,
    SlotsChecked,
    WakeAfter,
    Withdraw,
    Woken,
    WorkerExited,
)
from deepspeed_bamboo.elastic.gathering import GONE, MISSING
from deepspeed_bamboo.elastic.rules import Entry, Rules
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.supervisor import Supervisor
from tests.elastic.test_supervisor import SLOT, changed, epoch, kinds

FOUR = replace(SLOT, world_size=4, local_world_size=2)
FIRST = replace(FOUR, rank=0, local_rank=0)


def agent(rank: int, *, there: bool = True) -> Changed:
    record = AgentRecord(rank=rank, node=f"vm-{rank // 2}", pid=1) if there else None
    return changed("agent", record, worker=str(rank))


def starting(*events: Event, slot: Slot = FIRST, entry: Entry = Entry.START) -> Supervisor:
    made = Supervisor(slot, lease_seconds=3, rules=Rules(entry=entry))
    made.start()
    for event in events:
        made.handle(event)
    return made


ALL = tuple(agent(rank) for rank in range(4))
LOST = (agent(2, there=False), agent(3, there=False))


def test_slots_that_go_before_training_begins_end_the_job_and_are_named() -> None:
    job = starting(*ALL)
    assert job.handle(LOST[0]) == [WakeAfter(1, GONE)]
    assert job.handle(LOST[1]) == [], "of one machine: asked after together"
    assert job.handle(Woken(GONE)) == [CheckSlots((2, 3))]
    fail, end = job.handle(SlotsChecked((2, 3)))
    assert isinstance(fail, Fail) and end == EndWorker()
    assert fail.failure.message == (
        "lost slots 2, 3 on vm-1 before training began, and all 4 slots are needed to start; start the same command "
        "again, on every machine"
    )
    assert job.handle(WorkerExited("n-0-0", -15, "")) == [Withdraw("n-0-0")]
    said = Say(f"the job ends: {fail.failure.message}", once=True)
    assert job.handle(FailureRecorded(fail.failure, first=True)) == [said, Leave(75)]


@pytest.mark.parametrize("entry", [Entry.START, Entry.STANDBY])
def test_of_those_that_are_left_the_first_acts(entry: Entry) -> None:
    second = starting(*ALL, *LOST, slot=FOUR, entry=entry)
    assert second.handle(Woken(GONE)) == []
    second.handle(agent(0, there=False))
    assert second.handle(Woken(GONE)) == [CheckSlots((0, 2, 3))]


def test_slots_that_come_back_after_an_outage_are_not_lost() -> None:
    job = starting(*ALL, *LOST)
    job.handle(Woken(GONE))
    assert job.handle(SlotsChecked(())) == [WakeAfter(1, GONE)], "their return is not told of yet"
    job.handle(agent(2))
    job.handle(agent(3))
    assert job.handle(Woken(GONE)) == []
    assert job.handle(LOST[0]) == [WakeAfter(1, GONE)], "the next one is asked after again"


def test_once_there_is_an_epoch_slots_are_nobodys_business() -> None:
    job = starting(*ALL, epoch())
    assert job.handle(LOST[0]) == []
    late = starting(*ALL, *LOST, epoch())
    assert late.handle(Woken(GONE)) == []
    assert late.handle(SlotsChecked((2, 3))) == []
    assert late.handle(Woken(MISSING)) == []


def test_standbys_are_not_needed_to_begin() -> None:
    job = starting(*ALL, slot=replace(FIRST, start_workers=3))
    assert job.handle(agent(3, there=False)) == []


def test_slots_that_never_came_are_told_of_now_and_then_by_rank_0() -> None:
    job = Supervisor(FIRST, lease_seconds=3)
    assert job.start()[-1] == WakeAfter(10, MISSING)
    job.handle(agent(1))
    say, again = job.handle(Woken(MISSING))
    assert isinstance(say, Say) and say.text.startswith("waiting for 2 of 4 slots: 2, 3; ") and "same comm" in say.text
    assert again == WakeAfter(60, MISSING)
    job.handle(agent(2))
    assert [a.text[:27] for a in job.handle(again_woken()) if isinstance(a, Say)] == ["waiting for 1 of 4 slots: 3"]
    job.handle(agent(3))
    assert kinds(job.handle(again_woken())) == ["WakeAfter"]
    assert kinds(Supervisor(FOUR, lease_seconds=3).start()) == ["StartWorker"], "one says it"


def again_woken() -> Woken:
    return Woken(MISSING)


def test_a_stop_before_training_begins_ends_the_job_at_once() -> None:
    stop = changed("stop", "ds_bamboo stop")
    fail, end = starting(agent(0), agent(1)).handle(stop)
    assert isinstance(fail, Fail) and fail.failure.kind == "stopped" and end == EndWorker()
    assert "before training began (ds_bamboo stop)" in fail.failure.message and "exit code is 1" in fail.failure.message
    assert starting(*ALL, slot=FOUR).handle(stop) == [], "one acts"
    assert starting(*ALL, epoch()).handle(stop) == [], "the workers see to it at a boundary"
    assert starting(slot=FIRST, entry=Entry.JOIN).handle(stop) == []


def test_a_stop_before_training_begins_ends_with_1() -> None:
    job = starting(agent(0), changed("stop", "enough"))
    failure: Any = JobFailure(worker="n-0-0", kind="interrupted", message="m", traceback="")
    job.handle(WorkerExited("n-0-0", -15, ""))
    assert job.handle(FailureRecorded(failure, first=True))[-1] == Leave(1)


def test_a_machine_that_leaves_before_training_begins_makes_nobody_start_again() -> None:
    job = starting(*ALL, LauncherGone(7, command=False))
    assert job.handle(WorkerExited("n-0-0", -9, "")) == [Withdraw("n-0-0"), Leave(129)]


def test_a_worker_lost_before_training_begins_is_told_of_with_the_attempt() -> None:
    settled = LossSettled(("n-1-0",), None, "its process was killed by SIGKILL", generation=1)
    assert starting(*ALL).handle(settled) == [
        Say(
            "lost n-1-0 before training began (its process was killed by SIGKILL); all workers start again, attempt 2 "
            "of 4"
        )
    ]
    assert starting(*ALL).handle(LossSettled(("n-1-0",), None)) == [], "the job ends, which is told by itself"


def test_a_loss_in_training_names_the_worker_once() -> None:
    record = epoch("n-2-0").change.value
    settled = LossSettled(("n-2-0",), replace(record, reason="n-2-0: its process was killed by SIGKILL"))
    (say,) = starting(*ALL, epoch()).handle(settled)
    assert say == Say("lost n-2-0 (its process was killed by SIGKILL); the job continues in membership epoch 1")
