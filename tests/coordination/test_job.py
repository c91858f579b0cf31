"""The job's shared state, over both stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from deepspeed_bamboo.coordination.errors import EndpointError, JobNameTaken, NoEpoch
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.records import AgentRecord, Change, Drain, EpochRecord, JobFailure, Member
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.faults import Fault
from tests.coordination.helpers import Collector, first_epoch, member, unique_name, wait_until

OpenJob = Callable[[], JobCoordinator]
WORKERS = ["w0", "w1", "w2", "w3"]


@pytest.fixture
def open_job(open_store: Callable[[], KeyValueStore]) -> OpenJob:
    """A function that opens the same job from another client."""
    name = unique_name()
    return lambda: JobCoordinator(open_store(), job=name)


def test_members_are_there_from_registration_to_withdrawal(open_job: OpenJob) -> None:
    job, other = open_job(), open_job()
    registration = job.register(member("w1", rank=1), lease_seconds=5)
    assert other.members() == {"w1": member("w1", rank=1)}
    registration.withdraw()
    assert other.members() == {}
    registration.withdraw()
    assert not registration.lost.is_set()


def test_a_registration_outlives_its_lease_several_times(open_job: OpenJob) -> None:
    job = open_job()
    gone: Collector[Change] = Collector()
    registration = job.register(member("w0"), lease_seconds=1)
    job.watch(gone)
    time.sleep(2.2)  # there is no event to wait for: nothing must happen
    assert [c for c in gone.items if c.kind == "member" and c.value is None] == []
    assert not registration.lost.is_set()
    registration.withdraw()


def test_the_first_proposer_wins(open_job: OpenJob) -> None:
    jobs = [open_job() for _ in range(6)]
    together = threading.Barrier(len(jobs))
    won: list[str] = []

    def propose(number: int) -> None:
        record = replace(first_epoch(WORKERS), proposer=f"p{number}")
        together.wait()
        if jobs[number].propose(record, expected=None):
            won.append(record.proposer)

    threads = [threading.Thread(target=propose, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epoch = jobs[0].epoch()
    assert epoch is not None and won == [epoch.proposer]


def test_a_proposer_that_did_not_hear_of_its_success_may_propose_again(open_job: OpenJob) -> None:
    job, other = open_job(), open_job()
    record = first_epoch(WORKERS)
    assert job.propose(record, expected=None)
    assert job.propose(record, expected=None)
    assert not other.propose(replace(record, proposer="another"), expected=None)


def test_a_value_may_be_longer_than_etcd_takes(open_job: OpenJob) -> None:
    job, other, heard = open_job(), open_job(), []
    watch = other.watch(heard.append)
    long = {"known": {"states": '\u00e4"' * 1_200_000}, "activity": 7}
    assert other.long_value(3, "a") is None
    job.publish_long(3, "a", long)
    assert other.long_value(3, "a") == long and other.long_value(2, "a") is None and other.long_value(3, "b") is None
    job.publish_long(3, "a", {"activity": 8})  # by the next first member, after the loss of the one before
    assert other.long_value(3, "a") == {"activity": 8}
    job.publish_progress(3, "slot-1", {})
    wait_until(lambda: [change.kind for change in heard if change.kind != "resync"] == ["progress"])
    watch.stop()
    job.clean_up()
    assert other.long_value(3, "a") is None


def test_epochs_follow_one_another(open_job: OpenJob) -> None:
    job = open_job()
    assert job.epoch() is None
    start = first_epoch(WORKERS)
    with pytest.raises(ValueError, match="epoch 0 cannot follow epoch 3"):
        job.propose(start, expected=3)
    assert job.propose(replace(start, number=4), expected=3) is False
    assert job.propose(start, expected=None) is True
    assert job.propose(replace(start, proposer="another"), expected=None) is False
    assert job.propose(replace(start, number=1), expected=0) is True
    epoch = job.epoch()
    assert epoch is not None and epoch.number == 1


def test_a_loss_makes_the_next_epoch_with_the_shadow_as_owner(open_job: OpenJob) -> None:
    job = open_job()
    start = first_epoch(WORKERS)
    job.propose(start, expected=None)
    epoch = job.propose_loss(["w2"], reason="worker killed", proposer="agent-1")
    assert (epoch.number, epoch.lost, epoch.members) == (1, ("w2",), ("w0", "w1", "w3"))
    assert epoch.placement == start.placement.without(["w2"])[0]
    assert job.epoch() == epoch
    again = job.propose_loss(["w2"], reason="worker killed", proposer="agent-3")
    assert again == epoch, "a loss that is known already makes no further epoch"


def test_of_two_workers_that_cannot_reach_each_other_one_stays(open_job: OpenJob) -> None:
    one, other = open_job(), open_job()
    one.propose(first_epoch(WORKERS), expected=None)
    without = one.propose_loss(["w2"], reason="no answer to w1", proposer="w1", judge="w1")
    assert without.lost == ("w2",)
    assert other.propose_loss(["w1"], reason="no answer to w2", proposer="w2", judge="w2") == without
    assert one.epoch() == without and one.failure() is None


def test_a_worker_that_would_take_the_last_copy_along_stays(open_job: OpenJob) -> None:
    job = open_job()
    job.propose(first_epoch(["w0", "w1"]), expected=None)
    without = job.propose_loss(["w1"], reason="it leaves", proposer="w1", unless_fatal=True)
    assert without.lost == ("w1",)
    assert job.propose_loss(["w0"], reason="it leaves", proposer="w0", unless_fatal=True) == without
    assert job.failure() is None


def test_concurrent_reports_of_one_loss_make_one_epoch(open_job: OpenJob) -> None:
    jobs = [open_job() for _ in range(6)]
    jobs[0].propose(first_epoch(WORKERS), expected=None)
    together = threading.Barrier(len(jobs))
    results: list[EpochRecord] = []

    def report(number: int) -> None:
        together.wait()
        results.append(jobs[number].propose_loss(["w1"], reason="gone", proposer=f"agent-{number}"))

    threads = [threading.Thread(target=report, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and len(set(results)) == 1 and results[0].number == 1


def test_two_losses_reported_at_once_by_different_agents_both_count(open_job: OpenJob) -> None:
    jobs = [open_job(), open_job()]
    jobs[0].propose(first_epoch(WORKERS), expected=None)
    together = threading.Barrier(2)

    def report(number: int) -> None:
        together.wait()
        jobs[number].propose_loss([WORKERS[2 * number]], reason="gone", proposer=f"agent-{number}")

    threads = [threading.Thread(target=report, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epoch = jobs[0].epoch()
    assert epoch is not None and epoch.number == 2 and epoch.members == ("w1", "w3")
    assert jobs[0].failure() is None


@pytest.mark.parametrize(
    ("stores", "said"), [(True, "goes on from the last checkpoint"), (False, "begins at the first step")]
)
def test_a_fatal_loss_fails_the_job_and_names_the_coordinates(open_job: OpenJob, stores: bool, said: str) -> None:
    job = open_job()
    start = replace(first_epoch(WORKERS), stores=stores)
    job.propose(start, expected=None)
    assert job.propose_loss(["w1", "w2"], reason="zone lost", proposer="agent-0") == start
    failure = job.failure()
    assert failure is not None and failure.kind == "fatal_loss"
    assert "0.2" in failure.message and "w1, w2" in failure.message and "zone lost" in failure.message
    assert said in failure.message
    job.fail(JobFailure(worker="w3", kind="user_error", message="later", traceback=""))
    assert job.failure() == failure, "the first failure stands"


def test_a_loss_before_the_first_epoch_is_told_apart(open_job: OpenJob) -> None:
    with pytest.raises(NoEpoch, match="w1 lost before job"):
        open_job().propose_loss(["w1"], reason="killed", proposer="agent-1")


def test_a_lost_standby_costs_no_coordinate(open_job: OpenJob) -> None:
    job = open_job()
    start = first_epoch([*WORKERS, "spare"], stages=4)
    job.propose(start, expected=None)
    epoch = job.propose_loss(["spare"], reason="gone", proposer="agent-4")
    assert epoch.placement == start.placement and epoch.members == tuple(WORKERS)


def test_reports_are_kept_per_epoch_and_old_ones_removed(open_job: OpenJob) -> None:
    job = open_job()
    job.propose(first_epoch(WORKERS, protected=True), expected=None)
    job.publish_progress(0, "w0", {"forwarded": [0, 1]})
    job.publish_progress(0, "w1", {"forwarded": []})
    assert job.progress(0) == {"w0": {"forwarded": [0, 1]}, "w1": {"forwarded": []}}
    assert job.progress(1) == {}
    job.hand_in_report(0, "w0", {"activity": 3})
    job.hand_in_report(0, "w1", {})
    assert job.reports(0) == {"w0": {"activity": 3}, "w1": {}}
    job.report_suspicion(0, reporter="w0", suspect="w1", reason="connection reset")
    job.propose_loss(["w1"], reason="gone", proposer="a")
    job.publish_progress(1, "w0", {})
    job.hand_in_report(1, "w0", {})
    job.propose_loss(["w3"], reason="gone", proposer="a")
    assert job.progress(0) == {} and job.progress(1) == {"w0": {}}
    assert job.reports(0) == {} and job.reports(1) == {"w0": {}}


def test_a_watcher_is_told_everything_that_is_and_that_changes(open_job: OpenJob) -> None:
    job, other = open_job(), open_job()
    start = first_epoch(["w0", "w1"])
    job.propose(start, expected=None)
    told: Collector[Change] = Collector()
    watch = other.watch(told)
    told.wait_for(lambda change: change.kind == "resync")
    assert told.items[0] == Change("epoch", epoch=0, value=start)

    registration = job.register(member("w0"), lease_seconds=5)
    agent = job.register_agent(AgentRecord(rank=0, node="n0", pid=1), lease_seconds=5)
    epoch = job.propose_loss(["w1"], reason="gone", proposer="agent-1")
    job.publish_progress(1, "w0", {"step": 3})
    job.hand_in_report(1, "w0", {"of": "no interest to a watcher"})
    job.report_suspicion(1, reporter="w0", suspect="w9", reason="reset")
    job.mark_ended("w7", {"code": 0})
    job.request_drain("n4", deadline_seconds=30.0, reason="notice")
    drain = job.draining()["n4"]
    job.cancel_drain("n4")
    job.request_stop("enough")
    job.next_rank()
    registration.withdraw()
    agent.withdraw()
    job.finish({"digest": "d"})
    failure = JobFailure(worker="w0", kind="interrupted", message="m", traceback="")
    job.fail(failure)
    told.wait_for(lambda change: change.kind == "failure")
    assert told.items[2:] == [
        Change("member", worker="w0", value=member("w0")),
        Change("agent", worker="0", value=AgentRecord(rank=0, node="n0", pid=1)),
        Change("epoch", epoch=1, value=epoch),
        Change("progress", worker="w0", epoch=1, value={"step": 3}),
        Change("suspicion", worker="w9", epoch=1, value={"reporter": "w0", "reason": "reset"}),
        Change("ended", worker="w7", value={"code": 0}),
        Change("drain", worker="n4", value=drain),
        Change("drain", worker="n4"),
        Change("stop", value="enough"),
        Change("member", worker="w0"),
        Change("agent", worker="0"),
        Change("finished", value={"digest": "d"}),
        Change("failure", value=failure),
    ]
    watch.stop()


def test_an_exception_in_a_watcher_does_not_blind_it(open_job: OpenJob, caplog: pytest.LogCaptureFixture) -> None:
    job = open_job()
    told: Collector[Change] = Collector()

    def fail_on_ended(change: Change) -> None:
        if change.kind == "ended":
            raise KeyError("a bug in a callback")
        told(change)

    job.watch(fail_on_ended)
    job.mark_ended("w0", {})
    job.finish({})
    told.wait_for(lambda change: change.kind == "finished")
    assert "a bug in a callback" in caplog.text


def test_first_failure_and_first_summary_stand(open_job: OpenJob) -> None:
    job = open_job()
    assert job.failure() is None and job.finished() is None
    first = JobFailure(worker="w1", kind="user_error", message="boom", traceback="Traceback ...")
    assert job.fail(first) is True
    assert job.fail(replace(first, worker="w2")) is False
    assert job.failure() == first
    job.finish({"step": 1})
    job.finish({"step": 2})
    assert job.finished() == {"step": 1}


def test_generations_go_up_once_however_many_ask(open_job: OpenJob) -> None:
    jobs = [open_job() for _ in range(4)]
    together = threading.Barrier(4)
    answers: list[bool] = []

    def ask(job: JobCoordinator) -> None:
        together.wait()
        answers.append(job.advance_generation(expected=0))

    threads = [threading.Thread(target=ask, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4 and jobs[0].generation() == 1
    told: Collector[Change] = Collector()
    jobs[1].watch(told)
    told.wait_for(lambda change: change.kind == "resync")
    assert told.items[0] == Change("generation", value=1)


def test_workers_are_started_again_only_before_the_first_epoch(open_job: OpenJob) -> None:
    job = open_job()
    job.propose(first_epoch(WORKERS), expected=None)
    assert job.advance_generation(expected=0) is False
    assert job.generation() == 0


def test_a_generation_that_is_over_neither_counts_nor_makes_epochs(
    open_store: Callable[[], KeyValueStore],
) -> None:
    name = unique_name()
    old, new = (JobCoordinator(open_store(), job=name, generation=number) for number in (0, 1))
    left_over = old.register(member("n-0-0"), lease_seconds=5)
    assert old.advance_generation(expected=0) is True
    registration = new.register(member("n-0-1"), lease_seconds=5)
    assert old.propose(first_epoch(["n-0-0"]), expected=None) is False
    assert set(new.members()) == {"n-0-1"} and set(old.members()) == {"n-0-0"}
    assert set(JobCoordinator(open_store(), job=name).members()) == {"n-0-0", "n-0-1"}
    assert new.propose(first_epoch(["n-0-1"]), expected=None) is True
    left_over.withdraw()
    registration.withdraw()


def test_a_live_name_is_taken_and_a_dead_jobs_keys_are_removed(open_job: OpenJob) -> None:
    job, newcomer = open_job(), open_job()
    job.propose(first_epoch(WORKERS), expected=None)
    job.finish({})
    agent = job.register_agent(AgentRecord(rank=3, node="n7", pid=1), lease_seconds=5)
    with pytest.raises(JobNameTaken, match=r"slot 3 on n7.*--job"):
        with newcomer.claim_name(lease_seconds=10):
            pytest.fail("the name is in use")
    agent.withdraw()
    with newcomer.claim_name(lease_seconds=10):
        assert newcomer.epoch() is None and newcomer.finished() is None


def test_of_two_jobs_started_at_once_under_one_name_the_second_is_refused(open_job: OpenJob) -> None:
    one, two = open_job(), open_job()
    with one.claim_name(lease_seconds=10):
        with pytest.raises(JobNameTaken, match="being started"):
            with two.claim_name(lease_seconds=10):
                pytest.fail("the name is claimed")
        one.mark_ended("w", {})
    assert one.ended() == {"w": {}}, "the refused one has removed nothing"
    with two.claim_name(lease_seconds=10):
        assert two.ended() == {}


def test_clean_up_removes_this_job_only(open_store: Callable[[], KeyValueStore]) -> None:
    name = unique_name()
    store = open_store()
    job, longer = JobCoordinator(store, job=name), JobCoordinator(store, job=name + "0")
    for each in (job, longer):
        each.propose(first_epoch(WORKERS), expected=None)
        each.publish_progress(0, "w0", {})
        each.hand_in_report(0, "w0", {})
    job.clean_up()
    assert job.epoch() is None and store.read(f"/deepspeed_bamboo/{name}/").entries == ()
    assert job.reports(0) == {}
    assert longer.epoch() is not None and longer.reports(0) == {"w0": {}}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-x", "ü", "x" * 200])
def test_a_job_name_that_is_no_key_is_refused(name: str, open_store: Callable[[], KeyValueStore]) -> None:
    with pytest.raises(EndpointError, match="job name"):
        JobCoordinator(open_store(), job=name)


@pytest.mark.parametrize(
    "value",
    [
        member("w3", rank=3),
        first_epoch(WORKERS),
        JobFailure(worker="w", kind="user_error", message="m", traceback="t"),
        AgentRecord(rank=1, node="n", pid=2),
        Drain("n", None, "maintenance", 1.5),
    ],
)
def test_records_come_back_from_json(value: Member | EpochRecord | JobFailure | AgentRecord | Drain) -> None:
    assert type(value).from_json(value.to_json()) == value


def test_a_scripted_fault_is_claimed_once(open_job: OpenJob) -> None:
    jobs = [open_job() for _ in range(4)]
    name = Fault(5, 1, "idle").name
    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(lambda job: job.claim_fault(name), jobs)) == [False, False, False, True]
    assert jobs[0].claim_fault(Fault(5, 1, "idle", attempt=1).name)
    jobs[0].clean_up()
    assert jobs[1].claim_fault(name)


def test_the_last_agent_removes_no_keys_of_a_job_that_has_begun_since(open_job: OpenJob) -> None:
    ended, begun = open_job(), open_job()
    ended.finish({})
    with begun.claim_name(lease_seconds=30):
        begun.record_start(slots=1)
        ended.clean_up_if_last()
        assert begun.start_slots() == 1
        agent = begun.register_agent(AgentRecord(rank=0, node="n", pid=2), lease_seconds=30)
    ended.clean_up_if_last()
    assert begun.start_slots() == 1
    agent.withdraw()
    ended.clean_up_if_last()
    assert begun.start_slots() == 0 and not begun.is_being_started()


def test_how_a_job_ended_stays_though_two_agents_take_themselves_for_the_last(open_job: OpenJob) -> None:
    """Both have withdrawn before either looks; else a machine of later would train the job once more."""
    one, other = open_job(), open_job()
    one.finish({})
    one.clean_up_if_last()
    end = one.last_end()
    other.clean_up_if_last()
    assert end is not None and other.last_end() == end
    with other.claim_name(lease_seconds=30):
        assert other.last_end() is None
