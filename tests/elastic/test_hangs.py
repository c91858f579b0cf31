"""A worker that stands still is named, with its instruction and its stack, whatever holds its GIL."""

from __future__ import annotations

import os
from typing import Any

import pytest

from deepspeed_bamboo.elastic.decisions import Stuck
from deepspeed_bamboo.elastic.hang_watch import Hang, HangAction, HangRules, HangWatch, Resumed
from deepspeed_bamboo.elastic.rules import Rules
from deepspeed_bamboo.elastic.supervisor import Supervisor
from deepspeed_bamboo.elastic.worker_pulse import WorkerPulse, catches
from deepspeed_bamboo.protocol import STACK_SIGNAL
from deepspeed_bamboo.pulse import BEFORE_STEPS, IN_SCRIPT, Pulse, PulseReading
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.coordination.helpers import member, wait_until
from tests.elastic import workers
from tests.elastic.test_agent import ALL_WELL, epoch_of, finish, ranks
from tests.elastic.test_supervisor import OWN, SLOT, WORKERS, changed, epoch, kinds


def reading(since: float, *, step: int = 3, waiting: bool = False, doing: str = "FNC 0.1 2") -> PulseReading:
    return PulseReading(since, step, waiting, doing)


def after_steps(*seconds: float, rules: HangRules | None = None) -> tuple[HangWatch, float, int]:
    """A watch that has seen steps of so many seconds, the time after them, and their number."""
    watch, now = HangWatch(rules or HangRules()), 1000.0
    for step, taken in enumerate((0.0, *seconds)):
        now += taken
        assert watch.look(reading(now, step=step), now_seconds=now) is None
    return watch, now, len(seconds)


@pytest.mark.parametrize(
    ("steps", "limit"),
    [
        ((), 600.0),  # before two steps are complete
        ((1.0,), 600.0),
        ((1.0, 1.0, 1.0), 60.0),
        ((20.0, 20.0, 20.0), 200.0),  # ten usual ones
        ((1.0, 1.0, 1.0, 400.0, 1.0), 800.0),  # the longest was an evaluation; it may take twice as long
    ],
)
def test_the_limit_comes_from_the_jobs_own_steps(steps: tuple[float, ...], limit: float) -> None:
    assert after_steps(*steps)[0].limit_seconds == limit


def test_settings_come_first_but_not_while_the_job_starts() -> None:
    rules = HangRules(after_seconds=5.0, start_seconds=30.0)
    assert after_steps(1.0, 1.0, 1.0, rules=rules)[0].limit_seconds == 5.0
    assert after_steps(1.0, rules=rules)[0].limit_seconds == 30.0


def test_a_worker_that_stands_still_is_told_of_once_and_so_is_that_it_goes_on() -> None:
    watch, now, step = after_steps(1.0, 1.0, 1.0)
    stuck = reading(now, step=step)
    assert watch.look(stuck, now_seconds=now + 59.0) is None
    assert watch.look(stuck, now_seconds=now + 61.0) == Hang("FNC 0.1 2", step, 61.0, waiting=False)
    assert watch.look(stuck, now_seconds=now + 999.0) is None
    assert watch.look(reading(now + 1000.0, step=step), now_seconds=now + 1001.0) == Resumed(1001.0)
    assert watch.look(reading(now + 1000.0, step=step), now_seconds=now + 1002.0) is None


def test_who_waits_is_told_of_later_than_who_is_waited_for() -> None:
    watch, now, step = after_steps(1.0, 1.0, 1.0)
    waits = reading(now, step=step, waiting=True, doing="RECV_GRAD 0.1 2")
    assert watch.look(waits, now_seconds=now + 119.0) is None
    assert watch.look(waits, now_seconds=now + 121.0) == Hang("RECV_GRAD 0.1 2", step, 121.0, waiting=True)


@pytest.mark.parametrize("action", ["drain", "end"])
@pytest.mark.parametrize(
    ("doing", "waiting", "ended"),
    [
        ("FNC 0.1 2", False, True),
        ("train", False, True),
        ("RECV_GRAD 0.1 2", True, False),
        (IN_SCRIPT, False, False),  # an evaluation of its own, a callback, an export
        ("save", False, False),
        ("last checkpoint", False, False),
    ],
)
def test_nobody_is_ended_for_what_a_script_does_between_steps(
    action: HangAction, doing: str, waiting: bool, ended: bool
) -> None:
    agent = Supervisor(SLOT, lease_seconds=3, rules=Rules(hangs=HangRules(action=action)))
    agent.start()
    for event in (*(changed("member", member(worker), worker=worker) for worker in WORKERS), epoch()):
        agent.handle(event)
    done = kinds(agent.handle(Stuck(OWN, Hang(doing, 7, 100.0, waiting), "the stack")))
    assert done[:2] == ["Say", "PublishHang"]
    assert bool({"KillWorker", "Fail"} & {*done}) == ended


def test_what_the_worker_writes_is_what_its_agent_reads() -> None:
    made = WorkerPulse()
    try:
        assert made.read() is None
        pulse = Pulse.of_worker(made.environment)
        pulse.at("SEND_ACTIVATION 10.3 17 shadow")
        pulse.waits(True)
        first = made.read()
        assert first is not None and first.step == BEFORE_STEPS and first.waiting
        assert first.doing == "SEND_ACTIVATION 10.3 17 shadow"
        pulse.stepped(5)
        pulse.at(IN_SCRIPT)
        second = made.read()
        assert second is not None and (second.step, second.waiting, second.doing) == (5, False, IN_SCRIPT)
        assert second.since_seconds >= first.since_seconds
    finally:
        made.close()


def test_no_worker_is_sent_a_signal_that_would_end_it() -> None:
    made = WorkerPulse()
    try:
        assert not catches(os.getpid(), STACK_SIGNAL)
        assert made.stack(os.getpid()) == ""
    finally:
        made.close()


def hangs(action: str) -> dict[str, Any]:
    return {"after_seconds": 0.5, "start_seconds": 0.5, "action": action}


def test_a_hook_that_never_returns_is_named_with_its_stack_and_on_the_reporter(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.stand_still, argv=["4"], hangs=hangs("warn")) as machine:
        epoch_of(machine, 0)
        for rank in (0, 1):
            wait_until(lambda r=rank: "endless_hook" in machine.output(r), within_seconds=60, what="the stack")
        (worker, told), *others = machine.coordinator.hangs().items() or [("", {})]
        assert worker.endswith("-1-0") and not others
        assert (told["rank"], told["doing"], told["step"], told["waiting"]) == (1, "FNC 0.1 2", 7, False)
        wait_until(lambda: not machine.coordinator.hangs(), within_seconds=60, what="it to go on")
        assert epoch_of(machine, 0).number == 0, "it is a warning only"
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    named = "(rank 1 on "
    assert all(named in outcome.outputs[rank] and "in step 7, in FNC 0.1 2" in outcome.outputs[rank] for rank in (0, 1))
    assert "continues, after" in outcome.outputs[1]
    assert named not in outcome.outputs[2] + outcome.outputs[3], outcome.output


def test_a_setting_has_the_job_go_on_without_who_stands_still(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.stand_still, argv=["120"], hangs=hangs("drain")) as machine:
        epoch_of(machine, 0)
        assert ranks(epoch_of(machine, 1)) == [0, 2, 3]
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_setting_ends_the_job_of_who_stands_still(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.stand_still, argv=["120"], hangs=hangs("end")) as machine:
        epoch_of(machine, 0)
        outcome = machine.wait(within_seconds=60)
    assert set(outcome.exit_codes.values()) == {75}, outcome.output
    assert "has stood still" in outcome.outputs[0] and "hangs.action is end" in outcome.outputs[0]
