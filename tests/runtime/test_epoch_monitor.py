"""What ends a worker's waits: at the job's end, and on its way into the job."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.reconfiguring import Target
from deepspeed_bamboo.errors import DrainedError, ExpelledError
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, Interruption, JobCompleteError
from deepspeed_bamboo.runtime.for_scripts import ScriptEngine
from deepspeed_bamboo.runtime.membership.joining import join
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration
from tests.coordination.helpers import first_epoch, member

EPOCH = first_epoch(["w0", "w1"])
LATE = replace(EPOCH, number=1, members=("w0", "w1", "late"), reason="to join: late")
LOST = replace(LATE, number=2, members=("w0", "late"), lost=("w1",))


def test_a_complete_job_ends_the_waits_of_a_worker_at_its_end_and_no_others() -> None:
    interruption = Interruption()
    interruption.enter(EPOCH)
    interruption.announce_completion()
    assert not interruption.wait_until(lambda: False, timeout_seconds=0.0)
    with interruption.ending_when_complete(), pytest.raises(JobCompleteError):
        interruption.wait_until(lambda: False)
    assert not interruption.wait_until(lambda: False, timeout_seconds=0.0)


def test_who_is_left_alone_at_the_end_ends_as_soon_as_the_job_is_complete() -> None:
    """The others have seen that all are there; the last message, which one that was killed had, never comes."""
    interruption, done = Interruption(), []
    interruption.enter(EPOCH)
    announcing = threading.Thread(target=interruption.announce_completion)

    def agree_on(what: str, decide: Any) -> None:
        announcing.start()
        interruption.wait_until(lambda: False)

    session = SimpleNamespace(closed=False, interruption=interruption, finish=lambda step: done.append(step))
    worker = SimpleNamespace(agree_on=agree_on)
    engine: Any = SimpleNamespace(session=session, worker=worker, checkpoints=None, global_steps=7)
    engine.last_state = SimpleNamespace(keep_at_close=lambda: None)
    engine.leave = lambda: done.append("left")
    close: Any = ScriptEngine.close
    close.__wrapped__(engine)
    announcing.join()
    assert done == [7, "left"]


class Coming:
    """A worker that joins, up to where it takes part: in epoch ``LATE``, of which a member is lost at ``lost_at``."""

    def __init__(self, *, lost_at: str = "", error: Exception | None = None) -> None:
        self.interruption, self.entered, self.carried_out = Interruption(), False, False
        self.error = error
        self.interruption.announce_epoch(LATE)
        self.lost_at = lost_at
        target = Target(LATE.members, ("late",), (), EPOCH.placement, "late joined")
        known = {"target": target.to_json(), "placement": EPOCH.placement.to_json(), "activity": 5, "known": {}}
        self.session: Any = SimpleNamespace(
            worker="late",
            identity=SimpleNamespace(job="j"),
            interruption=self.interruption,
            finished=False,
            register=lambda rank, home: None,
            with_retries=self.ask,
            coordinator=SimpleNamespace(long_value=lambda epoch, name: known, members=self.members),
        )
        self.worker: Any = SimpleNamespace(
            session=self.session,
            me="late",
            record=LATE,
            host=SimpleNamespace(set_aside=lambda: None, save=lambda: None),
            view=SimpleNamespace(adopt=lambda record, placement: self.interruption.enter(record)),
            activity=SimpleNamespace(index=0, rounds=[]),
            links=SimpleNamespace(enter=self.enter),
        )

    def ask(self, call: Any) -> Any:
        if self.lost_at == "welcome":
            self.interruption.announce_epoch(LOST)
            self.interruption.wait_until(lambda: False)
        return call()

    def members(self) -> dict[str, Any]:
        if self.lost_at == "members":
            self.interruption.announce_epoch(LOST)
            return {worker: member(worker) for worker in LOST.members}
        return {worker: member(worker) for worker in LATE.members}

    def enter(self, **kwargs: Any) -> None:
        self.entered = True

    def carry_out(self, number: int, target: Target) -> None:
        self.carried_out = True
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        common: Any = SimpleNamespace(take=lambda known: None)
        reconfiguration: Any = SimpleNamespace(carry_out=self.carry_out)
        join(self.worker, reconfiguration=reconfiguration, common=common, known=lambda: None)


def test_a_loss_while_a_worker_comes_in_is_for_the_reconfiguration_to_recover_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    coming = Coming(lost_at="members")
    coming.join()
    assert coming.carried_out and not coming.entered
    with pytest.raises(EpochChangedError):  # is what the reconfiguration sees first
        coming.interruption.check()


def test_a_newcomer_that_cannot_build_its_part_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    coming = Coming(error=RuntimeError("CUDA out of memory"))
    with pytest.raises(ExpelledError, match=r"late can't take its part.*CUDA out of memory"):
        coming.join()
    assert coming.entered
    coming = Coming(error=RuntimeError("CUDA out of memory"))
    owners = {**dict(EPOCH.placement.owners), Coordinate(0, 1): "late"}
    coming.worker.record = replace(LATE, placement=Placement.of(Grid(1, 2), owners=owners, shadows={}))
    with pytest.raises(RuntimeError, match="CUDA"):  # others count on it by now
        coming.join()


def test_who_cannot_learn_what_it_must_know_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    coming = Coming(lost_at="welcome")
    with pytest.raises(ExpelledError, match="came too late for epoch 1"):
        coming.join()
    assert not coming.carried_out


@pytest.mark.parametrize("lost", [(), ("w1",)])
def test_who_leaves_and_hears_only_the_epoch_without_it_was_drained(lost: tuple[str, ...]) -> None:
    """Those who stay may be in it before what they said last has arrived. A loss is another matter."""
    placement = Placement.of(Grid(1, 2), owners=dict.fromkeys(Grid(1, 2), "w1"), shadows={})
    final = replace(EPOCH, number=1, members=("w1",), placement=placement, reason="drained: w0", lost=lost)
    interruption = Interruption()
    interruption.enter(EPOCH)
    interruption.announce_epoch(final)

    def perform(kind: str, body: Any) -> None:
        raise ExpelledError("epoch 1 does not include this worker")

    session = SimpleNamespace(interruption=interruption)
    worker: Any = SimpleNamespace(me="w0", perform=perform, session=session, placement=EPOCH.placement)
    nothing: Any = SimpleNamespace(disturb=lambda: None)
    parts: dict[str, Any] = dict.fromkeys(("transfer", "balancing", "steering", "modes", "world", "known"), nothing)
    leaving = Target(("w1",), (), ("w0",), placement, "drained: w0")
    with pytest.raises(ExpelledError if lost else DrainedError, match=None if lost else "drained: w0"):
        Reconfiguration(worker, **parts).carry_out(0, leaving)


def test_that_all_nodes_are_to_be_left_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody can be moved then, and whoever drains would wait for it."""
    worker: Any = SimpleNamespace(session=SimpleNamespace(worker="w0"), is_reporter=True)
    parts: dict[str, Any] = dict.fromkeys(("transfer", "steering", "modes", "world", "known"), None)
    reconfiguration = Reconfiguration(worker, balancing=SimpleNamespace(memory=None), **parts)  # type: ignore[arg-type]
    members = [WorkerSite(name, f"node-{name}", "") for name in ("w0", "w1")]
    for draining in ((), ("node-w0",), ("node-w0", "node-w1"), ("node-w0", "node-w1"), ()):
        reconfiguration._say_who_stays(members, draining)
    assert capfd.readouterr().err.count("all nodes are to be left") == 1
