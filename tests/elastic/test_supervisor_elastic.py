"""The agent's decisions about those who join, are replaced, are drained; without processes, network or clock."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.coordination import Drain
from deepspeed_bamboo.elastic.decisions import (
    Action,
    Changed,
    EndWorker,
    Event,
    ForgetDrain,
    LauncherGone,
    Leave,
    MarkEnded,
    ReportLoss,
    RequestDrain,
    Say,
    Signalled,
    StartWorker,
    WakeAfter,
    Withdraw,
    Woken,
    WorkerExited,
)
from deepspeed_bamboo.elastic.rules import Entry, Rules
from deepspeed_bamboo.elastic.supervisor import Supervisor
from tests.coordination.helpers import member
from tests.elastic.test_supervisor import EPOCH, OWN, SLOT, WORKERS, changed, epoch, kinds, supervisor, training

RESYNC = changed("resync")
REPLACED = f"{OWN}.1"


def joining(entry: Entry, *events: Event, **rules: Any) -> Supervisor:
    made = Supervisor(SLOT, lease_seconds=3, rules=Rules(entry=entry, **rules))
    assert made.start() == []
    for event in events:
        made.handle(event)
    return made


def grown(*workers: str, number: int = 1) -> Changed:
    """An epoch that has ``workers`` besides those of the first."""
    return changed("epoch", replace(EPOCH, number=number, members=(*EPOCH.members, *workers)), epoch=number)


def drain(node: str = "n", *, deadline_seconds: float | None = 30.0) -> Changed:
    return changed("drain", Drain(node, deadline_seconds, "EC2 takes it", 0.0), worker=node)


def starts(actions: list[Action]) -> list[StartWorker]:
    return [action for action in actions if isinstance(action, StartWorker)]


def restarting(*events: Event, most: int = 3) -> Supervisor:
    made = Supervisor(SLOT, lease_seconds=3, rules=Rules(max_restarts=most, restart_seconds=5))
    made.start()
    for event in (*(changed("member", member(w), worker=w) for w in WORKERS), epoch(), RESYNC, *events):
        made.handle(event)
    return made


def test_a_standby_starts_with_the_first_epoch_and_in_its_generation() -> None:
    agent = joining(Entry.STANDBY, RESYNC)
    assert agent.handle(changed("generation", 1)) == []
    assert starts(agent.handle(epoch())) == [StartWorker("n-1-1", 1, joining=True)]
    assert starts(agent.handle(epoch())) == []


def test_what_the_store_tells_first_is_not_acted_on_before_all_is_told() -> None:
    agent = joining(Entry.JOIN)
    assert starts(agent.handle(epoch())) == []
    assert agent.handle(changed("generation", 2)) == []
    assert agent.handle(RESYNC) == [StartWorker("n-1-2", 2, joining=True)]


def test_a_job_that_ended_meanwhile_cannot_be_joined() -> None:
    assert kinds(joining(Entry.JOIN).handle(RESYNC)) == ["Say", "Leave"]
    finished = joining(Entry.JOIN, epoch())
    assert finished.handle(changed("finished", {})) == [Leave(0)]
    assert joining(Entry.STANDBY).handle(RESYNC) == []


def test_a_lost_worker_is_replaced_a_few_times_later_each_time() -> None:
    agent = restarting(most=2)
    lost = agent.handle(WorkerExited(OWN, -9, ""))
    assert kinds(lost) == ["ReportLoss", "WakeAfter"] and lost[1] == WakeAfter(5, "restart")
    assert agent.handle(epoch(OWN)) == []
    assert agent.handle(Woken("restart")) == [StartWorker(REPLACED, 0, joining=True)]
    agent.handle(grown(REPLACED, number=2))
    assert agent.handle(WorkerExited(REPLACED, -11, ""))[1] == WakeAfter(10, "restart")
    agent.handle(epoch(OWN))
    assert agent.handle(Woken("restart")) == [StartWorker(f"{OWN}.2", 0, joining=True)]
    report, say = agent.handle(WorkerExited(f"{OWN}.2", -9, ""))
    assert isinstance(report, ReportLoss) and isinstance(say, Say) and "topology.max_restarts" in say.text


def test_a_worker_is_not_replaced_before_its_loss_is_settled() -> None:
    agent = restarting(WorkerExited(OWN, -9, ""))
    assert agent.handle(Woken("restart")) == []
    assert agent.handle(epoch(OWN)) == [StartWorker(REPLACED, 0, joining=True)]


@pytest.mark.parametrize("news", [changed("stop", "enough"), drain()])
def test_nobody_is_replaced_in_a_job_that_stops_or_on_a_node_to_be_left(news: Changed) -> None:
    agent = restarting(WorkerExited(OWN, -9, ""), epoch(OWN), news)
    assert [a for a in agent.handle(Woken("restart")) if isinstance(a, StartWorker)] == []


def test_a_user_error_is_not_replaced() -> None:
    agent = restarting()
    assert kinds(agent.handle(WorkerExited(OWN, 1, "Traceback"))) == ["Fail"]


@pytest.mark.parametrize("known", [True, False])
def test_an_expelled_worker_comes_back_as_another(known: bool) -> None:
    agent = restarting(*([epoch(OWN)] if known else []))
    actions = agent.handle(WorkerExited(OWN, 4, "ExpelledError"))
    if not known:
        assert actions == [WakeAfter(10, "explanation")]
        actions = agent.handle(epoch(OWN))
    assert actions == [Withdraw(OWN), WakeAfter(5, "restart")]
    assert agent.handle(Woken("restart")) == [StartWorker(REPLACED, 0, joining=True)]


def test_a_newcomer_that_steps_back_is_a_loss_and_not_the_jobs_end() -> None:
    """It was a member when it found that it can't take part; the others wait for it until its loss is known."""
    agent = restarting(WorkerExited(OWN, -9, ""), epoch(OWN))
    agent.handle(Woken("restart"))
    agent.handle(grown(REPLACED, number=2))
    assert agent.handle(WorkerExited(REPLACED, 4, "ExpelledError")) == [WakeAfter(2.0, "explanation")]
    assert kinds(agent.handle(Woken("explanation"))) == ["ReportLoss", "WakeAfter"]


@pytest.mark.parametrize("code", [3, 4, 5, 7])
def test_a_code_that_the_jobs_records_do_not_explain_is_the_scripts_own(code: int) -> None:
    """os._exit may be called with any: also with those by which workers tell their agents something else."""
    agent = training()
    actions = agent.handle(WorkerExited(OWN, code, ""))
    if code != 7:
        assert kinds(actions) == ["WakeAfter"]
        actions = agent.handle(Woken("explanation"))
    assert kinds(actions) == ["Fail"]


def test_a_joiner_that_cannot_run_does_not_end_the_job() -> None:
    agent = joining(Entry.STANDBY, RESYNC, epoch())
    withdraw, say = agent.handle(WorkerExited(OWN, 1, "Traceback\nImportError: x"))
    assert withdraw == Withdraw(OWN) and isinstance(say, Say) and "ImportError: x" in say.text
    assert agent.handle(changed("finished", {})) == [Leave(0)]

    alone = Supervisor(replace(SLOT, world_size=1), lease_seconds=3, rules=Rules(entry=Entry.JOIN))
    for event in (epoch(), RESYNC):
        alone.handle(event)
    assert alone.handle(WorkerExited(OWN, 1, "Traceback"))[-1] == Leave(1)


def test_a_joiner_that_was_taken_in_ends_the_job_with_its_error_like_anybody() -> None:
    agent = joining(Entry.STANDBY, RESYNC, changed("epoch", replace(EPOCH, members=("n-0-0", "n-2-0")), epoch=0))
    agent.handle(changed("epoch", replace(EPOCH, number=1), epoch=1))
    assert kinds(agent.handle(WorkerExited(OWN, 1, "Traceback"))) == ["Fail"]


def test_a_joiner_that_comes_too_late_is_ended_with_the_job() -> None:
    elsewhere = changed("epoch", replace(EPOCH, members=("n-0-0", "n-2-0")), epoch=0)
    agent = joining(Entry.JOIN, elsewhere, RESYNC)
    assert agent.handle(changed("finished", {})) == [EndWorker()]
    assert agent.handle(WorkerExited(OWN, -15, "")) == [Withdraw(OWN), Leave(0)]


def test_a_signal_to_a_command_that_joined_ends_its_part_only() -> None:
    agent = joining(Entry.JOIN, epoch(), RESYNC)
    assert kinds(agent.handle(Signalled(signal.SIGINT))) == ["KillWorker"]
    assert kinds(agent.handle(WorkerExited(OWN, -9, ""))) == ["ReportLoss", "Leave"]
    agent = joining(Entry.JOIN, epoch(), RESYNC)
    assert kinds(agent.handle(LauncherGone(7, command=True))) == ["KillWorker"]


@pytest.mark.parametrize("entry", [Entry.START, Entry.JOIN])
@pytest.mark.parametrize("told_first", [True, False])
def test_a_machine_that_shuts_down_is_left_where_sigterm_is_a_notice(entry: Entry, told_first: bool) -> None:
    """All its processes are sent SIGTERM, of which the deepspeed command dies."""
    rules = Rules(entry=entry, notice_signals=frozenset({signal.SIGUSR1, signal.SIGTERM}))
    agent = Supervisor(SLOT, lease_seconds=3, rules=rules)
    agent.start()
    for event in (epoch(), RESYNC):
        agent.handle(event)
    gone = LauncherGone(7, command=True)
    if not told_first:
        assert agent.handle(gone) == [WakeAfter(3.0, "launcher gone")]
    assert kinds(agent.handle(Signalled(signal.SIGTERM))) == ["RequestDrain"]
    agent.handle(drain())
    assert agent.handle(gone if told_first else Woken("launcher gone")) == []
    alone = Supervisor(SLOT, lease_seconds=3, rules=rules)
    alone.start()
    for event in (epoch(), RESYNC, gone):
        alone.handle(event)
    ends = {Entry.START: ["Fail", "EndWorker"], Entry.JOIN: ["KillWorker"]}[entry]
    assert kinds(alone.handle(Woken("launcher gone"))) == ends, "nobody has told it of a shutdown"


def test_a_drained_worker_is_no_loss_and_its_agent_leaves() -> None:
    agent = training()
    agent.handle(drain())
    assert agent.handle(changed("epoch", replace(epoch(OWN).change.value, lost=()), epoch=1)) == [
        WakeAfter(3, "expelled")
    ]
    assert agent.handle(Woken("expelled")) == [], "it is given time to leave by itself"
    actions = agent.handle(WorkerExited(OWN, 5, ""))
    assert actions[1:] == [MarkEnded(OWN, 0, drained=True), ForgetDrain("n"), Leave(0)]
    assert isinstance(actions[0], Say) and agent.drained


def test_a_worker_that_leaves_before_the_epoch_without_it_is_known_here() -> None:
    agent = training()
    assert agent.handle(WorkerExited(OWN, 5, "")) == [WakeAfter(2.0, "explanation")]
    assert agent.handle(epoch(OWN))[-1] == Leave(0)

    agent = training()
    agent.handle(changed("drain", Drain("n", None, "why", 1.0), worker="n"))
    agent.handle(WorkerExited(OWN, 5, ""))
    assert kinds(agent.handle(Woken("explanation")))[0] == "ReportLoss", "nobody took over what it had"


def test_others_know_a_drained_worker_from_a_vanished_one() -> None:
    agent = training()
    agent.handle(changed("ended", {"generation": 0, "drained": True}, worker="n-2-0"))
    assert agent.handle(changed("member", worker="n-2-0")) == []
    agent.handle(changed("ended", {"generation": 0}, worker="n-0-0"))
    agent.handle(WorkerExited(OWN, 0, ""))
    assert agent.handle(changed("ended", {"generation": 0}, worker=OWN)) == [], "n-2-0 is a member still"
    assert kinds(agent.handle(epoch("n-2-0"))) == ["Finish"]


def test_a_worker_left_out_without_a_reason_is_ended_after_a_while() -> None:
    agent = training()
    agent.handle(changed("epoch", replace(epoch(OWN).change.value, lost=()), epoch=1))
    assert kinds(agent.handle(Woken("expelled"))) == ["Say", "KillWorker"]


def test_a_worker_that_stands_by_leaves_a_node_that_is_to_be_left() -> None:
    agent = joining(Entry.STANDBY, epoch(), RESYNC)
    assert agent.handle(drain()) == [EndWorker()]
    assert agent.handle(drain()) == []
    assert agent.handle(WorkerExited(OWN, -15, "")) == [Withdraw(OWN), ForgetDrain("n"), Leave(0)]


def test_slots_without_a_worker_leave_a_node_that_is_to_be_left() -> None:
    assert joining(Entry.STANDBY, RESYNC).handle(drain()) == [ForgetDrain("n"), Leave(0)]
    assert restarting(WorkerExited(OWN, -9, ""), epoch(OWN)).handle(drain()) == [ForgetDrain("n"), Leave(0)]
    assert training().handle(drain("another")) == []


def test_the_first_slot_of_a_node_tells_once_that_it_is_to_be_left() -> None:
    agent = training(slot=replace(SLOT, local_rank=0))
    (say,) = agent.handle(drain())
    assert isinstance(say, Say) and "within 30 s: EC2 takes it" in say.text
    assert agent.handle(drain(deadline_seconds=10.0)) == []


def test_signals_that_are_notices_drain_the_node() -> None:
    (request,) = training().handle(Signalled(signal.SIGUSR1))
    assert isinstance(request, RequestDrain) and (request.node, request.deadline_seconds) == ("n", 30.0)
    rules = Rules(notice_signals=frozenset({signal.SIGTERM}), grace_seconds=20)
    agent = Supervisor(SLOT, lease_seconds=3, rules=rules)
    agent.start()
    (request,) = agent.handle(Signalled(signal.SIGTERM))
    assert isinstance(request, RequestDrain) and "SIGTERM" in request.reason and request.deadline_seconds == 20


def test_only_the_slots_of_the_start_must_end_without_an_epoch() -> None:
    agent = supervisor(slot=replace(SLOT, start_workers=2))
    agent.handle(WorkerExited(OWN, 0, ""))
    agent.handle(changed("ended", {"generation": 0}, worker=OWN))
    assert kinds(agent.handle(changed("ended", {"generation": 0}, worker="n-0-0"))) == ["Finish"]
