"""Nobody is left who can train: agents wait for machines, and start workers anew; as decisions and as processes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.cli.job_view import look
from deepspeed_bamboo.coordination import AgentRecord, EpochRecord, JobCoordinator, MemoryStore, Roster
from deepspeed_bamboo.coordination.losing import starting_anew, waiting, without_lost
from deepspeed_bamboo.elastic.assembly import EVERYBODY, MACHINES, Offer, Seat, assemble, seat_of
from deepspeed_bamboo.elastic.decisions import (
    Action,
    AssembleAgain,
    Changed,
    CheckSlots,
    Fail,
    FailureRecorded,
    KillWorker,
    Leave,
    OfferSlot,
    ReportLoss,
    SlotsChecked,
    StartAnew,
    StartWorker,
    WakeAfter,
    Withdraw,
    Woken,
    WorkerExited,
)
from deepspeed_bamboo.elastic.rules import Entry, Rules
from deepspeed_bamboo.elastic.supervisor import Supervisor
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.coordination.helpers import first_epoch, member, wait_until
from tests.elastic import workers
from tests.elastic.test_agent import epoch_of, finish, ranks
from tests.elastic.test_supervisor import OWN, SLOT, WORKERS, changed, kinds

FIRST = replace(first_epoch(WORKERS), waits_seconds=60.0)
WAITING = waiting(FIRST, WORKERS, reason="all are dead", proposer="test")
RESYNC = changed("resync")
RULES = {"max_restarts": 3, "restart_seconds": 5.0}


def told(record: EpochRecord) -> Changed:
    return changed("epoch", record, epoch=record.number)


def there(*slots: int) -> list[Changed]:
    return [changed("agent", AgentRecord(slot, "n", 1), worker=str(slot)) for slot in slots]


def offer(slot: int, *, reached: int = 7) -> dict[str, Any]:
    return {"slot": slot, "address": f"10.0.0.{slot}", "port": 5000 + slot, "reached": reached}


def offered(slot: int, number: int = WAITING.number, **facts: Any) -> Changed:
    return changed("progress", offer(slot, **facts), epoch=number, worker=f"slot-{slot}")


def roster(*slots: int, generation: int = 1) -> EpochRecord:
    first = Roster(slots, generation, f"10.0.0.{slots[0]}", 5000 + slots[0], 7)
    return starting_anew(WAITING, first, proposer="test")


def agent(*events: Any, entry: Entry = Entry.START, **rules: Any) -> Supervisor:
    made = Supervisor(SLOT, lease_seconds=3, rules=Rules(entry=entry, **{**RULES, **rules}))
    made.start()
    members = [changed("member", member(w), worker=w) for w in WORKERS] if entry is Entry.START else []
    for event in (*there(0, 1, 2), *members, *([told(FIRST)] if members else []), *events):
        made.handle(event)
    return made


def lost(*events: Any, **rules: Any) -> Supervisor:
    """An agent whose worker was killed with all others, and could be replaced now."""
    return agent(RESYNC, WorkerExited(OWN, -9, ""), told(WAITING), Woken("restart"), *events, **rules)


def only(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# -- who starts ------------------------------------------------------------------------------------


@given(offers=st.sets(st.integers(0, 9)), agents=st.sets(st.integers(0, 9), min_size=1), had_time=st.booleans())
def test_who_is_there_and_has_offered_itself_starts(offers: set[int], agents: set[int], had_time: bool) -> None:
    made = {slot: Offer.from_json(offer(slot, reached=slot)) for slot in offers}
    found = assemble(WAITING, made, agents, all_had_time=had_time)
    ready = sorted(offers & agents)
    if not ready or (ready != sorted(agents) and not had_time):
        assert found is None
        return
    assert found is not None and found.generation == WAITING.generation + 1
    assert list(found.slots) == ready[: len(WAITING.placement.grid)], "no more than there are coordinates"
    assert (found.address, found.port) == (f"10.0.0.{ready[0]}", 5000 + ready[0]) and found.reached == ready[-1]
    seats = [seat_of(starting_anew(WAITING, found, proposer="test"), slot) for slot in found.slots]
    assert [seat and (seat.index, seat.workers) for seat in seats] == [(i, len(seats)) for i in range(len(seats))]


@pytest.mark.parametrize("leaving", [1, 2, 3])
@pytest.mark.parametrize(("goes_back", "waits"), [*itertools.product([False, True], [0.0, 60.0])])
def test_agents_wait_where_nobody_could_go_back(leaving: int, goes_back: bool, waits: float) -> None:
    current = replace(FIRST, goes_back=goes_back, waits_seconds=waits)
    after = without_lost(current, WORKERS[:leaving], reason="", proposer="")
    if leaving == 1 or (goes_back and leaving < 3):
        assert after is not None and after.trains
    elif waits:
        assert after is not None and after.waits and after.number == 1 and after.restoring == -1
        assert EpochRecord.from_json(after.to_json()) == after
    else:
        assert after is None
    starting = roster(0, 2)
    assert EpochRecord.from_json(starting.to_json()) == starting


# -- what an agent does ----------------------------------------------------------------------------


def test_an_agent_whose_worker_was_killed_offers_its_slot_when_it_may_replace_it() -> None:
    made = agent(RESYNC, WorkerExited(OWN, -9, ""))
    actions = made.handle(told(WAITING))
    assert [a.reason for a in only(actions, WakeAfter)] == [f"{MACHINES}1", f"{EVERYBODY}1"]
    assert made.handle(Woken("restart")) == [OfferSlot(1)]
    assert made.handle(Woken("restart")) == [], "once"


def test_a_worker_that_is_left_ends_and_starts_anew_with_the_others() -> None:
    made = agent(RESYNC)
    assert only(made.handle(told(WAITING)), KillWorker)
    assert made.handle(WorkerExited(OWN, -9, "")) == [Withdraw(OWN), WakeAfter(5.0, "restart")]
    assert made.handle(Woken("restart")) == [OfferSlot(1)]


def test_all_start_once_all_have_offered_their_slots_or_had_the_time() -> None:
    made = lost(offered(1), offered(0))
    (start,) = made.handle(offered(2))
    assert isinstance(start, StartAnew) and start.roster.slots == (0, 1, 2) and start.epoch == WAITING
    made = lost(offered(1), offered(2, number=0))
    assert made.handle(changed("agent", worker="0")) == [], "slot 2 has not offered itself in this epoch"
    (start,) = made.handle(Woken(f"{EVERYBODY}1"))
    assert isinstance(start, StartAnew) and start.roster.slots == (1,)
    made = lost(offered(1), offered(0))
    (start,) = made.handle(changed("agent", worker="2"))
    assert isinstance(start, StartAnew) and start.roster.slots == (0, 1), "who is gone is not waited for"


def test_a_seat_is_taken_and_the_first_epoch_follows() -> None:
    made = lost(offered(1))
    seat = Seat(index=1, workers=2, address="10.0.0.0", port=5000, pipelines=1, reached=7)
    assert made.handle(told(roster(0, 1))) == [StartWorker("n-1-1.1", 1, seat=seat)]
    record = replace(roster(0, 1), number=3, members=("n-0-1.1", "n-1-1.1"), roster=None)
    made.handle(told(record))
    assert made.handle(WorkerExited("n-1-1.1", -9, ""))[0] == ReportLoss(
        "n-1-1.1", "its process was killed by SIGKILL", 1
    )


def test_who_has_no_seat_joins_when_the_job_trains() -> None:
    made = lost()
    assert made.handle(told(roster(0, 2))) == []
    record = replace(roster(0, 2), number=3, members=("n-0-1.1", "n-2-1.1"), roster=None)
    assert only(made.handle(told(record)), StartWorker) == [StartWorker("n-1-1.1", 1, joining=True)]


def test_a_machine_that_comes_while_agents_wait_starts_with_them() -> None:
    made = agent(told(WAITING), entry=Entry.JOIN)
    assert made.handle(RESYNC) == [OfferSlot(1)]
    assert only(made.handle(told(roster(1))), StartWorker)[0].worker == "n-1-1"


def test_a_loss_while_workers_start_makes_all_wait_again() -> None:
    made = lost(told(roster(0, 1)))
    actions = made.handle(changed("agent", worker="0"))
    assert actions == [CheckSlots((0,))]
    again = made.handle(SlotsChecked((0,)))
    assert [type(a) for a in again] == [AssembleAgain]
    assert made.handle(SlotsChecked(())) == []
    second = waiting(roster(0, 1), (), reason="slot 0", proposer="test")
    assert only(made.handle(told(second)), KillWorker)
    assert made.handle(WorkerExited("n-1-1.1", -9, "")) == [Withdraw("n-1-1.1"), WakeAfter(5.0, "restart")]
    assert made.handle(Woken("restart")) == [OfferSlot(3)]


def test_a_worker_that_joins_as_all_others_are_lost_starts_anew_and_counts_for_nothing() -> None:
    made = agent(RESYNC, WorkerExited(OWN, -9, ""), max_restarts=1)
    made.handle(told(replace(FIRST, number=1, members=("n-0-0",), lost=(OWN,))))
    assert made.handle(Woken("restart")) == [StartWorker("n-1-0.1", 0, joining=True)]
    idle = waiting(replace(FIRST, number=1), ("n-0-0",), reason="the last one", proposer="test")
    assert only(made.handle(told(idle)), KillWorker)
    made.handle(told(replace(roster(0), number=3)))
    assert made.handle(WorkerExited("n-1-0.1", -9, "")) == [Withdraw("n-1-0.1"), WakeAfter(5.0, "restart")]
    again = waiting(replace(roster(0), number=3), (), reason="", proposer="test")
    made.handle(told(again))
    assert made.handle(Woken("restart")) == [OfferSlot(4)]


FAILED = WorkerExited("n-1-1.1", 1, "a worker was lost before training began")
AGAIN = waiting(roster(0, 1), ("n-0-1.1",), reason="killed", proposer="test")


def test_a_worker_that_fails_because_another_was_lost_meanwhile_starts_again() -> None:
    made = lost(told(roster(0, 1)))
    assert made.handle(FAILED) == [WakeAfter(5.0, "explanation")]
    assert WakeAfter(5.0, "restart") in made.handle(told(AGAIN)), "that was no fault of this slot"
    assert made.handle(Woken("restart")) == [OfferSlot(3)]


@pytest.mark.parametrize("recorded_first", [True, False])
def test_the_loss_of_another_may_be_known_late(recorded_first: bool) -> None:
    made = lost(told(roster(0, 1)), FAILED)
    (fail,) = made.handle(Woken("explanation"))
    news = [FailureRecorded(fail.failure, first=False), told(AGAIN)]
    actions = [action for event in (news if recorded_first else news[::-1]) for action in made.handle(event)]
    assert WakeAfter(5.0, "restart") in actions
    assert made.handle(Woken("restart")) == [OfferSlot(3)]


def test_a_script_that_fails_as_it_starts_anew_ends_the_job() -> None:
    made = lost(told(roster(0, 1)), FAILED)
    (fail,) = made.handle(Woken("explanation"))
    assert fail.failure.kind == "user_error"
    assert made.handle(FailureRecorded(fail.failure, first=True))[-1] == Leave(1)


def test_where_nobody_comes_the_job_ends_with_75() -> None:
    made = lost(max_restarts=0)
    assert only(made.handle(Woken("restart")), OfferSlot) == []
    assert made.handle(Woken(f"{MACHINES}0")) == [], "of another time"
    (fail,) = made.handle(Woken(f"{MACHINES}1"))
    assert isinstance(fail, Fail) and fail.failure.kind == "no_machines"
    actions = made.handle(FailureRecorded(fail.failure, first=True))
    assert kinds(actions) == ["Say", "Leave"] and actions[-1] == Leave(75)


def test_the_end_of_the_wait_is_none_of_workers_that_start() -> None:
    made = lost(told(roster(0, 1)))
    assert made.handle(Woken(f"{MACHINES}1")) == []


@pytest.mark.parametrize("before", [True, False])
def test_a_job_that_waits_can_be_stopped(before: bool) -> None:
    stop = changed("stop", "enough")
    made = agent(RESYNC, WorkerExited(OWN, -9, ""), *([stop] if before else []))
    actions = made.handle(told(WAITING)) + ([] if before else made.handle(stop))
    (fail,) = only(actions, Fail)
    assert fail.failure.kind == "stopped"
    assert made.handle(FailureRecorded(fail.failure, first=True))[-1] == Leave(1)


def test_status_says_that_the_job_waits_and_for_what() -> None:
    coordinator = JobCoordinator(MemoryStore(), job="j")
    coordinator.register_agent(AgentRecord(0, "n", 1), lease_seconds=60)
    coordinator.propose(FIRST, expected=None)
    coordinator.propose_loss(WORKERS[:2], reason="a zone is gone", proposer="test")
    view = look(coordinator)
    assert view.state == "waiting" and "a zone is gone" in view.detail and "60 s" in view.detail
    waits = coordinator.epoch()
    assert waits is not None
    coordinator.start_anew(waits, Roster((0,), 1, "a", 1, 7), proposer="test")
    view = look(coordinator)
    assert view.state == "starting" and view.missing_slots == () and "1 workers" in view.detail


# -- as processes ----------------------------------------------------------------------------------


def all_killed(machine: Machine, generations: int = 0) -> None:
    for rank in range(2):
        machine.kill_worker(rank, generation=generations)


def test_all_workers_are_killed_and_start_anew(fork_server: ForkServer) -> None:
    settings = {"environment": {"TEST_WAITS_SECONDS": "60"}, "max_restarts": 2}
    with Machine(fork_server, workers.train, workers=2, **settings) as machine:
        epoch_of(machine, 0)
        all_killed(machine)
        wait_until(lambda: anew(machine, 1), within_seconds=60, what="the first epoch of new workers")
        assert ranks(machine.coordinator.epoch() or FIRST) == [0, 1]
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.output
    assert "nobody is left who can train" in outcome.output


@pytest.mark.sweep
@pytest.mark.parametrize("agents_left", [2, 1])
def test_one_is_killed_while_all_start_anew(fork_server: ForkServer, agents_left: int) -> None:
    """The other fails because of it, which is no fault of its script; whoever is left starts once more."""
    argv = [] if agents_left == 2 else ["with its agent"]
    settings: dict[str, Any] = {"environment": {"TEST_WAITS_SECONDS": "60"}, "max_restarts": 3, "argv": argv}
    with Machine(fork_server, workers.die_while_all_start_anew, workers=2, **settings) as machine:
        epoch_of(machine, 0)
        all_killed(machine)
        wait_until(lambda: anew(machine, 2), within_seconds=60, what="the first epoch of the second start")
        assert ranks(machine.coordinator.epoch() or FIRST) == [0, 1][:agents_left]
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0 if agents_left == 2 else -9}, outcome.output


def anew(machine: Machine, generation: int) -> bool:
    epoch = machine.coordinator.epoch()
    return epoch is not None and epoch.trains and epoch.generation == generation


def test_nobody_may_start_and_nobody_comes(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, workers=2, environment={"TEST_WAITS_SECONDS": "0.5"}) as machine:
        epoch_of(machine, 0)
        all_killed(machine)
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 75, 1: 75}, outcome.output
    assert "no machine came within 0.5 s" in outcome.output


@pytest.mark.sweep
def test_a_machine_that_comes_takes_the_job_over(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, workers=2, environment={"TEST_WAITS_SECONDS": "60"}) as machine:
        epoch_of(machine, 0)
        all_killed(machine)
        wait_until(lambda: look(machine.coordinator).state == "waiting", what="agents to wait")
        rank = machine.join()
        wait_until(lambda: anew(machine, 1), within_seconds=60, what="the first epoch of the new worker")
        assert ranks(machine.coordinator.epoch() or FIRST) == [rank]
        outcome = finish(machine)
    assert set(outcome.exit_codes.values()) == {0}, outcome.output
