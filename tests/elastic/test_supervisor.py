"""The agent's decisions, without processes, network or clock."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import Change, JobFailure
from deepspeed_bamboo.elastic.decisions import (
    Action,
    Changed,
    CheckSuspect,
    CheckVanished,
    CoordinatorGone,
    EndWorker,
    Event,
    Fail,
    FailureRecorded,
    Finish,
    LauncherGone,
    Leave,
    MarkEnded,
    ReportLoss,
    Say,
    Signalled,
    StartWorker,
    WakeAfter,
    Withdraw,
    Woken,
    WorkerExited,
)
from deepspeed_bamboo.elastic.interruptions import by_signal
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.supervisor import Supervisor
from tests.coordination.helpers import first_epoch, member

SLOT = Slot(
    rank=1,
    local_rank=1,
    world_size=3,
    local_world_size=3,
    node="n",
    zone="z",
    master_addr="127.0.0.1",
    master_port=1,
)
WORKERS = ["n-0-0", "n-1-0", "n-2-0"]
OWN = "n-1-0"
EPOCH = first_epoch(WORKERS)
OTHERS_FAILURE = JobFailure(worker="n-2-0", kind="user_error", message="boom", traceback="Traceback")


def changed(kind: Any, value: Any = None, **parts: Any) -> Changed:
    return Changed(Change(kind, value=value, **parts))


def epoch(*lost: str) -> Changed:
    placement, _ = EPOCH.placement.without(lost)
    assert placement is not None
    members = tuple(worker for worker in WORKERS if worker not in lost)
    record = replace(EPOCH, number=len(lost), members=members, placement=placement, lost=lost)
    return changed("epoch", record, epoch=record.number)


def supervisor(*events: Event, slot: Slot = SLOT) -> Supervisor:
    """One that has heard ``events`` since its start."""
    made = Supervisor(slot, lease_seconds=3)
    made.start()
    for event in events:
        made.handle(event)
    return made


def training(**kwargs: Any) -> Supervisor:
    """One whose job is in its first epoch with all members there."""
    return supervisor(*(changed("member", member(w), worker=w) for w in WORKERS), epoch(), **kwargs)


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_it_starts_its_worker() -> None:
    assert Supervisor(SLOT, lease_seconds=3).start() == [StartWorker(OWN, 0)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_worker_killed_by_a_signal_is_a_loss_and_the_agent_stays(number: int) -> None:
    agent = training()
    assert agent.handle(WorkerExited(OWN, -number, "")) == [
        ReportLoss(OWN, f"its process was killed by {signal.Signals(number).name}", 0)
    ]
    assert agent.handle(epoch(OWN)) == []
    assert agent.handle(changed("member", worker=OWN)) == []
    assert agent.handle(changed("finished", {})) == [Leave(0)]
    assert agent.handle(Signalled(signal.SIGTERM)) == [], "nothing after it has left"


def test_an_exception_fails_the_job_and_is_printed_only_if_it_was_the_first() -> None:
    for first, printed in ((True, True), (False, False)):
        agent = training()
        (fail,) = agent.handle(WorkerExited(OWN, 1, "Traceback ...\nKeyError: 'x'"))
        assert isinstance(fail, Fail) and fail.failure.kind == "user_error"
        assert "KeyError: 'x'" in fail.failure.message and "(rank 1)" in fail.failure.message
        actions = agent.handle(FailureRecorded(fail.failure, first=first))
        if not first:
            actions += agent.handle(changed("failure", OTHERS_FAILURE))
        assert any(isinstance(a, Say) and "Traceback" in a.text for a in actions) is printed
        assert actions[-1] == Leave(1)


def test_it_does_not_leave_before_its_own_failure_is_settled() -> None:
    agent = training()
    (fail,) = agent.handle(WorkerExited(OWN, 1, "Traceback"))
    assert isinstance(fail, Fail)
    assert agent.handle(changed("failure", fail.failure)) == []
    assert kinds(agent.handle(FailureRecorded(fail.failure, first=True))) == ["Say", "Leave"]


def test_a_failure_elsewhere_ends_the_worker_then_the_agent() -> None:
    agent = training()
    assert agent.handle(changed("failure", OTHERS_FAILURE)) == [EndWorker()]
    assert agent.handle(Signalled(signal.SIGTERM)) == [], "the launcher's own clean-up changes nothing"
    assert agent.handle(WorkerExited(OWN, -15, "")) == [Withdraw(OWN), Leave(1)]


def test_after_a_fatal_loss_the_same_command_may_be_given_again() -> None:
    for failure, code in (("fatal_loss", 75), ("no_start", 1)):
        agent = training()
        record = JobFailure(worker="n-2-0", kind=failure, message="0.2 is gone", traceback="")  # type: ignore[arg-type]
        assert agent.handle(changed("failure", record))[-1] == EndWorker()
        assert agent.handle(WorkerExited(OWN, -15, ""))[-1] == Leave(code)


def test_a_failure_that_the_worker_recorded_itself_is_shown_by_its_agent_once() -> None:
    failure = JobFailure(worker=OWN, kind="user_error", message="KeyError: 1", traceback="Traceback\nKeyError: 1")
    agent = training()
    say, end = agent.handle(changed("failure", failure))
    assert isinstance(say, Say) and "(rank 1)" in say.text and "Traceback" in say.text and end == EndWorker()
    assert agent.handle(WorkerExited(OWN, 1, "Traceback\nKeyError: 1")) == [Withdraw(OWN), Leave(1)]

    late = training()
    (fail,) = late.handle(WorkerExited(OWN, 1, "Traceback\nKeyError: 1"))
    assert isinstance(fail, Fail)
    seen = late.handle(changed("failure", failure)) + late.handle(FailureRecorded(fail.failure, first=False))
    assert [a for a in seen if isinstance(a, Say) and "Traceback" in a.text] != [] and seen[-1] == Leave(1)


def test_the_first_slot_of_a_node_tells_of_a_failure_elsewhere() -> None:
    agent = training(slot=replace(SLOT, local_rank=0))
    assert kinds(agent.handle(changed("failure", OTHERS_FAILURE))) == ["Say", "EndWorker"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_job_for_all(number: signal.Signals) -> None:
    agent = training()
    fail, end = agent.handle(Signalled(number))
    assert isinstance(fail, Fail) and fail.failure.kind == "interrupted" and number.name in fail.failure.message
    assert end == EndWorker()
    assert agent.handle(WorkerExited(OWN, -15, "")) == [Withdraw(OWN)]
    assert kinds(agent.handle(FailureRecorded(fail.failure, first=True))) == ["Say", "Leave"]


def test_what_ends_jobs_by_itself_is_named_with_the_signal() -> None:
    assert "when one of them has ended" in by_signal(signal.SIGTERM, SLOT)
    assert "when one of them" not in by_signal(signal.SIGTERM, replace(SLOT, local_world_size=1))
    assert "terminal" in by_signal(signal.SIGHUP, SLOT)
    assert by_signal(signal.SIGINT, SLOT) == "SIGINT was sent to the agent of rank 1 on n"


def test_an_interruption_is_told_by_one_agent_of_the_machine() -> None:
    theirs = replace(OTHERS_FAILURE, kind="interrupted")
    first = replace(SLOT, local_rank=0)
    assert kinds(training(slot=first).handle(changed("failure", theirs))) == ["EndWorker"]
    of_two = training(slot=replace(first, world_size=6))
    assert kinds(of_two.handle(changed("failure", theirs))) == ["Say", "EndWorker"]


def test_who_is_signalled_ends_as_a_signal_ends_a_program_whoever_told_of_it_first() -> None:
    theirs = replace(OTHERS_FAILURE, kind="interrupted")
    for signalled, code in ((True, 143), (False, 1)):
        agent = training()
        agent.handle(changed("failure", theirs))
        assert agent.handle(Signalled(signal.SIGTERM)) == [] if signalled else True
        assert agent.handle(WorkerExited(OWN, -15, ""))[-1] == Leave(code)


def test_a_second_ctrl_c_does_not_wait_for_the_worker() -> None:
    agent = training()
    agent.handle(Signalled(signal.SIGINT))
    assert kinds(agent.handle(Signalled(signal.SIGINT))) == ["KillWorker"]


def test_a_sigterm_to_the_worker_is_a_loss_unless_the_agent_gets_one_too() -> None:
    agent = training()
    assert agent.handle(WorkerExited(OWN, -15, "")) == [WakeAfter(0.3, "explanation")]
    assert kinds(agent.handle(Woken("explanation"))) == ["ReportLoss"]

    agent = training()
    agent.handle(WorkerExited(OWN, -15, ""))
    (fail,) = agent.handle(Signalled(signal.SIGTERM))
    assert isinstance(fail, Fail) and fail.failure.kind == "interrupted"
    assert agent.handle(Woken("explanation")) == []
    assert agent.handle(FailureRecorded(fail.failure, first=True))[-1] == Leave(143)


def test_a_worker_that_left_because_the_job_failed_elsewhere_is_no_error_of_its_own() -> None:
    agent = training()
    (wake,) = agent.handle(WorkerExited(OWN, 3, ""))
    assert isinstance(wake, WakeAfter)
    assert agent.handle(changed("failure", OTHERS_FAILURE)) == [Leave(1)]


def test_an_expelled_worker_is_killed_and_not_reported() -> None:
    agent = training()
    actions = agent.handle(epoch(OWN))
    assert kinds(actions) == ["Say", "KillWorker"]
    assert agent.handle(WorkerExited(OWN, -9, "")) == [Withdraw(OWN)]
    assert agent.handle(changed("finished", {})) == [Leave(0)]


def test_a_stopped_worker_is_ended_though_its_agent_was_stopped_too_and_heard_of_no_epoch_that_had_it() -> None:
    members = [changed("member", member(worker), worker=worker) for worker in WORKERS]
    agent = supervisor(*members)
    assert kinds(agent.handle(epoch(OWN))) == ["Say", "KillWorker"]
    # Nor of the one that lost it: shadows were rebuilt meanwhile, and the job came to its end.
    agent = supervisor(*members)
    assert agent.handle(changed("epoch", replace(epoch(OWN).change.value, lost=(), number=2))) == [
        WakeAfter(3, "expelled")
    ]
    agent.handle(changed("finished", {}))
    assert kinds(agent.handle(Woken("expelled"))) == ["Say", "KillWorker"]
    assert agent.handle(WorkerExited(OWN, -9, "")) == [Withdraw(OWN), Leave(0)]


def test_an_expelled_worker_that_left_by_itself_is_no_error() -> None:
    agent = training()
    agent.handle(epoch(OWN))
    assert agent.handle(WorkerExited(OWN, 4, "ExpelledError")) == [Withdraw(OWN)]


def test_a_vanished_member_is_looked_at_but_no_one_else() -> None:
    agent = training()
    assert agent.handle(changed("member", worker="n-2-0")) == [CheckVanished("n-2-0")]
    assert agent.handle(changed("member", worker="stranger")) == []
    assert agent.handle(changed("ended", {"generation": 0}, worker="n-0-0")) == []
    assert agent.handle(changed("member", worker="n-0-0")) == [], "its script has ended"
    agent.handle(changed("finished", {}))
    assert agent.handle(changed("member", worker=OWN)) == []


def test_a_member_that_was_never_there_is_looked_at_after_a_lease() -> None:
    agent = supervisor(changed("member", member(OWN), worker=OWN), changed("member", member("n-0-0"), worker="n-0-0"))
    assert agent.handle(epoch()) == [WakeAfter(3, "absent")]
    assert agent.handle(Woken("absent")) == [CheckVanished("n-2-0")]


def test_only_the_own_workers_suspicion_is_looked_into() -> None:
    agent = training()
    theirs = changed("suspicion", {"reporter": "n-0-0", "reason": "reset"}, worker="n-2-0", epoch=0)
    ours = changed("suspicion", {"reporter": OWN, "reason": "reset"}, worker="n-2-0", epoch=0)
    assert agent.handle(theirs) == []
    assert agent.handle(ours) == [CheckSuspect("n-2-0", "reset")]
    agent.handle(changed("ended", {"generation": 0}, worker="n-2-0"))
    (fail,) = agent.handle(ours)
    assert isinstance(fail, Fail) and "same number of steps" in fail.failure.message


def test_the_job_is_finished_when_every_members_script_has_ended() -> None:
    agent = training()
    assert agent.handle(WorkerExited(OWN, 0, "")) == [MarkEnded(OWN, 0)]
    agent.handle(epoch("n-2-0"))
    assert agent.handle(changed("ended", {"generation": 0}, worker=OWN)) == []
    assert kinds(agent.handle(changed("ended", {"generation": 0}, worker="n-0-0"))) == ["Finish"]
    assert agent.handle(changed("finished", {})) == [Leave(0)]


def test_without_an_epoch_all_slots_scripts_must_have_ended() -> None:
    agent = supervisor()
    agent.handle(WorkerExited(OWN, 0, ""))
    assert agent.handle(changed("ended", {"generation": 0}, worker="n-0-0")) == []
    assert agent.handle(changed("ended", {"generation": 0}, worker=OWN)) == []
    assert agent.handle(changed("ended", {"generation": 0}, worker="n-2-0")) == [
        Finish("every worker has ended its script")
    ]


def test_a_worker_that_still_runs_is_waited_for_after_the_job_is_complete() -> None:
    agent = training()
    assert agent.handle(changed("finished", {})) == []
    assert agent.handle(WorkerExited(OWN, 0, "")) == [MarkEnded(OWN, 0), Leave(0)]


def test_a_crash_after_the_job_is_complete_is_mentioned_only() -> None:
    agent = training()
    agent.handle(changed("finished", {}))
    assert kinds(agent.handle(WorkerExited(OWN, -11, ""))) == ["Say", "MarkEnded", "Leave"]


def test_an_exception_after_the_job_is_complete_is_still_an_error() -> None:
    agent = training()
    agent.handle(changed("finished", {}))
    (fail,) = agent.handle(WorkerExited(OWN, 1, "Traceback"))
    assert isinstance(fail, Fail)
    assert agent.handle(FailureRecorded(fail.failure, first=True))[-1] == Leave(1)


def test_a_new_generation_replaces_the_worker_whatever_became_of_it() -> None:
    running = supervisor()
    assert kinds(running.handle(changed("generation", 1))) == ["KillWorker"]
    assert running.handle(WorkerExited(OWN, -9, "")) == [Withdraw(OWN), StartWorker("n-1-1", 1)]
    assert running.handle(WorkerExited(OWN, -9, "")) == [], "the old one is history"

    dead = supervisor(WorkerExited(OWN, -9, ""))
    assert dead.handle(changed("generation", 1)) == [Withdraw(OWN), StartWorker("n-1-1", 1)]
    assert dead.handle(changed("generation", 1)) == []
    assert dead.handle(WorkerExited("n-1-1", -9, "")) == [ReportLoss("n-1-1", "its process was killed by SIGKILL", 1)]


def test_the_failure_that_made_all_start_again_does_not_end_the_job() -> None:
    agent = supervisor()
    (fail,) = agent.handle(WorkerExited(OWN, 1, "lost connection"))
    assert isinstance(fail, Fail)
    assert agent.handle(changed("generation", 1)) == [Withdraw(OWN), StartWorker("n-1-1", 1)]
    assert agent.handle(FailureRecorded(fail.failure, first=False)) == []


def test_a_generation_that_skips_one_is_caught_up_with() -> None:
    agent = supervisor(changed("generation", 1))
    assert agent.handle(changed("generation", 2)) == []
    assert agent.handle(WorkerExited(OWN, -9, "")) == [Withdraw(OWN), StartWorker("n-1-2", 2)]


def test_without_its_launcher_a_job_of_one_machine_ends() -> None:
    fail, end = training().handle(LauncherGone(4711, command=False))
    assert isinstance(fail, Fail) and "the launcher (process 4711) is gone" in fail.failure.message
    assert "was sent" not in fail.failure.message and end == EndWorker()


def test_without_its_launcher_one_of_several_machines_counts_as_lost() -> None:
    agent = training(slot=replace(SLOT, world_size=6))
    assert kinds(agent.handle(LauncherGone(7, command=False))) == ["KillWorker"]
    assert kinds(agent.handle(WorkerExited(OWN, -9, ""))) == ["ReportLoss", "Leave"]


def test_without_the_deepspeed_command_every_machine_ends() -> None:
    agent = training(slot=replace(SLOT, world_size=6))
    assert kinds(agent.handle(LauncherGone(7, command=True))) == ["Fail", "EndWorker"]


def test_without_its_coordinator_every_agent_ends_on_its_own() -> None:
    agent = training()
    say = Say("the job ends: rank 0 is gone", once=True)
    assert agent.handle(CoordinatorGone("rank 0 is gone")) == [say, EndWorker()]
    assert agent.handle(WorkerExited(OWN, -15, "")) == [Withdraw(OWN), Leave(75)]

    waiting = training()
    waiting.handle(Signalled(signal.SIGTERM))
    waiting.handle(WorkerExited(OWN, -15, ""))
    assert waiting.handle(CoordinatorGone("rank 0 is gone"))[-1] == Leave(143)

    done = training()
    done.handle(WorkerExited(OWN, 0, ""))
    assert done.handle(changed("finished", {})) == [Leave(0)]
