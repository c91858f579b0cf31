"""``"policy": "proactive"``: who joins stands by until that is worth something, and the bits are the same."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.config.section import parse_bamboo_section
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.reconfiguring import Target
from deepspeed_bamboo.core.steering import MOST_WAIT_SECONDS
from deepspeed_bamboo.runtime.membership.steering import Found, Steering
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_with_joiners
from tests.runtime.test_losses import BF16, ZERO

PROACTIVE = {"policy": "proactive"}
# What each stage's forward seems to take, so that no decision depends on the load of this machine.
SECONDS = [1.0] * 4


def kill(step: int, stage: int) -> dict[str, Any]:
    return {"step": step, "pipeline": 0, "stage": stage, "at": "backward", "micro_batch": 1}


def check_equal(jobs: Jobs, result: JobResult, training: Training) -> None:
    plain = dataclasses.replace(training, name=f"{training.name}-plain", faults=[], bamboo={})
    expected = jobs.run(train_with_joiners, world=4, training=plain, waits={})
    losses = expected.common("losses")
    for rank in result.survivors:
        own = result.values[rank]["losses"]
        assert own == {step: losses[step] for step in own}, f"rank {rank}"
    assert result.common("digest") == expected.common("digest")


def test_a_fifth_worker_waits_and_takes_the_place_of_a_lost_one(jobs: Jobs) -> None:
    """Each stage has a worker, so nothing is gained by a fifth until one is lost: then it is taken in at once."""
    training = Training("proactive-1x4", 4, steps=13, faults=[kill(10, 2)], bamboo=PROACTIVE)
    result = jobs.run(
        train_with_joiners, world=4, joining=1, training=training, waits={"6": 1, "7": 1, "10": 1}, seconds=SECONDS
    )
    assert result.survivors == [0, 1, 3, 4], result.transcript()
    check_equal(jobs, result, training)
    assert [len(now) for now in result.values[0]["members"]] == [4] * 10 + [3, 4, 4]
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]
    decisions = result.values[0]["decisions"]
    assert decisions and decisions[0][1] == "wait", decisions
    assert "move: 4 workers host" in decisions[0][2] and "wait: 4 workers host" in decisions[0][2]
    assert "proactive: wait: iterations expected" in result.outputs[0]


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [{}, {**BF16, **ZERO}], ids=["fp32", "bf16-zero1"])
def test_who_has_waited_for_20_iterations_stands_by(jobs: Jobs, settings: dict[str, Any]) -> None:
    """As a member that hosts nothing; it gets the stage of one that is lost later."""
    training = Training("stands-by-1x4", 4, steps=36, settings=settings, faults=[kill(32, 1)], bamboo=PROACTIVE)
    result = jobs.run(train_with_joiners, world=4, joining=1, training=training, waits={"6": 1}, seconds=SECONDS)
    assert result.survivors == [0, 2, 3, 4], result.transcript()
    check_equal(jobs, result, training)
    assert [action for _, action, _ in result.values[0]["decisions"]][:2] == ["wait", "stand by"]
    members = [len(now) for now in result.values[0]["members"]]
    assert members[:26] == [4] * 26 and members[30] == 5 and members[-1] == 4
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]


@pytest.mark.sweep
def test_the_one_that_decides_is_lost_while_another_waits(jobs: Jobs) -> None:
    training = Training("leader-lost-1x4", 4, steps=14, faults=[kill(9, 0)], bamboo=PROACTIVE)
    result = jobs.run(train_with_joiners, world=4, joining=1, training=training, waits={"6": 1}, seconds=SECONDS)
    assert result.survivors == [1, 2, 3, 4], result.transcript()
    check_equal(jobs, result, training)
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]


# -- one worker's part, without a job ------------------------------------------------------------------

GRID = Grid(1, 4)
OWNERS = dict(zip(GRID, ("w0", "w1", "w2", "w3"), strict=True))
SHADOWS = dict(zip(GRID, ("w3", "w0", "w1", "w2"), strict=True))
WHOLE = Placement.of(GRID, owners=OWNERS, shadows=SHADOWS)
NODES = [WorkerSite(f"w{i}", f"n{i}") for i in range(5)]


class OneWorker:
    """Its steering, with what it has said; all stages take a second."""

    def __init__(self, placement: Placement = WHOLE, *, policy: str = "proactive", measured: bool = True) -> None:
        config = parse_bamboo_section({"policy": policy})
        self.told: list[dict[str, Any]] = []
        self.worker: Any = SimpleNamespace(
            me="w0",
            step=10,
            epoch=3,
            placement=placement,
            is_reporter=True,
            session=SimpleNamespace(config=config, worker="w0"),
            log_event=lambda event, **fields: self.told.append({"event": event, **fields}),
        )
        balancing: Any = SimpleNamespace(seconds_of=lambda one: self.seconds.get(one, 1.0) if measured else None)
        self.seconds: dict[Placement, float] = {}
        self.now = 0.0
        self.steering = Steering(self.worker, balancing=balancing, clock=lambda: self.now)
        self.steering.look(["w0", "w1", "w2", "w3", "w4"], waiting=["w4"])

    def chosen(self, target: Target, *, sites: list[WorkerSite] = NODES) -> Target | None:
        return self.steering.chosen(Found(("key",), target), sites=sites)


def with_w4(placement: Placement = WHOLE, *, leaving: tuple[str, ...] = ()) -> Target:
    return Target(("w0", "w1", "w2", "w3", "w4"), ("w4",), leaving, placement, "joined: w4")


def test_fixed_carries_out_what_is_found() -> None:
    one = OneWorker(policy="fixed")
    assert one.chosen(with_w4()) == with_w4()
    assert one.steering.put_off(("key",)) is None and one.told == []


def test_what_is_put_off_is_not_looked_for_again_and_told_once() -> None:
    one = OneWorker()
    assert one.chosen(with_w4()) is None
    assert one.steering.put_off(("key",)) == with_w4()
    assert one.steering.put_off(("another",)) is None
    assert one.chosen(with_w4()) is None
    assert [(event["event"], event["action"], event["joining"]) for event in one.told] == [("decision", "wait", ["w4"])]


def test_after_20_iterations_it_stands_by_and_stages_stay() -> None:
    one = OneWorker()
    moved = Placement.of(GRID, owners={**OWNERS, tuple(GRID)[3]: "w4"}, shadows=SHADOWS)
    assert one.chosen(with_w4(moved)) is None
    one.worker.step += 20
    found = one.chosen(with_w4(moved))
    assert found is not None
    assert (found.placement, found.members, found.reason) == (WHOLE, with_w4().members, "joined: w4, to stand by")
    assert MOST_WAIT_SECONDS == 60.0


def test_who_waits_is_taken_in_once_that_has_cost_as_much_as_the_move() -> None:
    """What is foreseen doesn't come. An iteration of 0.9 s next to one of 1 s pays for a second in ten."""
    one = OneWorker()
    for number in range(1, 13):
        one.now = 5.0 * number
        one.steering.look(
            ["w0", "w1", "w2", "w3", "w4", *(f"x{k}" for k in range(number))], waiting=["w4"] * (number > 11)
        )
    moved = Placement.of(GRID, owners={**OWNERS, tuple(GRID)[3]: "w4"}, shadows=SHADOWS)
    one.seconds[moved] = 0.9
    assert one.chosen(with_w4(moved)) is None
    for seconds in (62.0, 69.0):
        one.now = seconds
        assert one.chosen(with_w4(moved)) is None
    one.now = 70.5
    assert one.chosen(with_w4(moved)) == with_w4(moved)
    assert [event["action"] for event in one.told] == ["wait", "move"]
    assert "waiting has cost 1.1" in one.told[-1]["reason"]


def test_a_worker_that_left_by_plan_is_not_a_loss() -> None:
    one = OneWorker()
    one.steering.moved(WHOLE, with_w4(leaving=("w1",)), seconds=0.25)
    one.steering.look(["w0", "w3", "w4"], waiting=[])
    assert one.steering.to_json()["availability"]["open"] == [1, 1]  # one moment, one loss: w2


@pytest.mark.parametrize(
    ("placement", "target", "sites"),
    [
        pytest.param(WHOLE, with_w4(leaving=("w1",)), NODES, id="a node is to be left"),
        pytest.param(
            Placement.of(GRID, owners=OWNERS, shadows=dict(list(SHADOWS.items())[1:])),
            with_w4(),
            NODES,
            id="a stage has no shadow",
        ),
        pytest.param(
            WHOLE,
            with_w4(Placement.of(GRID, owners=OWNERS, shadows=dict.fromkeys(GRID, "w4"))),
            [WorkerSite(f"w{i}", "n0") for i in range(4)] + [WorkerSite("w4", "n1")],
            id="a node would take all",
        ),
    ],
)
def test_where_something_would_be_less_safe_there_is_no_choice(
    placement: Placement, target: Target, sites: list[WorkerSite]
) -> None:
    one = OneWorker(placement)
    assert one.chosen(target, sites=sites) == target
    assert one.told == []


def test_before_stages_are_measured_there_is_no_choice() -> None:
    assert OneWorker(measured=False).chosen(with_w4()) == with_w4()


def test_who_joins_knows_what_was_seen_and_what_it_cost() -> None:
    one, other = OneWorker(), OneWorker()
    one.steering.look(["w0", "w1", "w2"], waiting=[])
    one.steering.moved(WHOLE, with_w4(), seconds=0.25)
    one.steering.note({"w0": {"pause": (3, True, {"total": 0.5})}})
    known = one.steering.to_json()
    assert (known["stand_bys"], known["pauses"], known["availability"]["open"]) == ([0.25], [0.5], [1, 2])
    other.steering.take(known)
    assert other.steering.to_json() == known
