"""What one worker knows of the times of stages: also one that has joined, whenever it came to know them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.membership.balancing import Balancing

STAGES, MICRO_BATCHES = 4, 4
GRID = Grid(1, STAGES)


def balancing(placement: Placement, *, is_reporter: bool = False) -> Balancing:
    record = SimpleNamespace(number=1, members=("a", "b", "c"))
    worker: Any = SimpleNamespace(
        grid=GRID, micro_batches=MICRO_BATCHES, placement=placement, record=record, is_reporter=is_reporter
    )
    unused: Any = SimpleNamespace()
    return Balancing(worker, times=unused, beside=dict, device_memory=unused)


def on_two() -> Placement:
    """Two stages each, and a third worker stands by."""
    return Placement.of(GRID, owners=dict(zip(GRID, "aabb", strict=True)), shadows={})


def iteration(*stages: int, seconds: float = 0.6) -> dict[str, dict[str, Any]]:
    """What both contribute in an iteration in which these stages were measured."""
    owner = "aabb"
    its = {name: [(stage, 0.01, 0.02) for stage in stages if owner[stage] == name] for name in "ab"}
    return {**{name: {"passes": (passes, seconds), "beside": {}} for name, passes in its.items()}, "c": {}}


def test_who_joins_knows_what_the_others_have_measured() -> None:
    old, new = balancing(on_two()), balancing(on_two())
    for _ in range(3):
        old.note(iteration(0, 1, 2, 3))
    assert old.profile is not None and new.profile is None
    new.take(json.loads(json.dumps(old.to_json())))
    assert new.profile == old.profile
    new.note(iteration(0, 1, 2, 3))
    assert new.profile is not None


def test_times_that_are_known_late_are_a_reason_to_look_at_the_placement() -> None:
    """Stages 2 and 3 are measured only after the first iterations of a placement, which nobody changes."""
    own = balancing(on_two())
    record: Any = SimpleNamespace(number=1)
    assert own.is_due(record)
    for _ in range(4):
        own.note(iteration(0, 1))
        assert not own.is_due(record)
    for _ in range(3):
        own.note(iteration(2, 3))
    own.note(iteration(0, 1, 2, 3))
    assert own.profile is not None
    assert own.is_due(record)
    own.note(iteration(0, 1, 2, 3))
    assert not own.is_due(record)


def test_a_slow_worker_is_drained_after_an_outage_of_the_coordinator() -> None:
    """Training does not wait for it: the next iteration asks again."""
    own, asked = balancing(on_two(), is_reporter=True), list[str]()
    outages = [CoordinatorUnavailable(endpoints=["127.0.0.1:1"], tried_seconds=1.0, reason="away")]

    def request_drain(node: str, *, deadline_seconds: float, reason: str) -> None:
        if outages:
            raise outages.pop()
        asked.append(f"{node}: {reason}")

    worker: Any = own._worker
    worker.session = SimpleNamespace(
        config=SimpleNamespace(topology=SimpleNamespace(slow_workers="drain"), profile=None),
        coordinator=SimpleNamespace(request_drain=request_drain),
        present={name: SimpleNamespace(node=f"node-{name}") for name in "abc"},
        draining={},
    )
    own._measured = replace(own._measured, slowness=SimpleNamespace(speeds={"b": 0.5}))  # type: ignore[arg-type]
    for expected in ([], ["node-b: worker b is slow"], ["node-b: worker b is slow"]):
        own._drain_slow_workers()
        if own._asking.ident is not None:
            own._asking.join()
        assert asked == expected


def test_the_event_says_how_the_job_runs_that_is_measured() -> None:
    """By which `simulate` and `advise` know what the times have in them, and who has whose state."""
    for pipelines, expected in ((1, {"copies": 2}), (2, {"copies": 2, "alike": True})):
        grid = Grid(pipelines, STAGES)
        placement = Placement.of(grid, owners=dict.fromkeys(grid, "a"), shadows={}, alike=pipelines > 1, copies=2)
        own, written = balancing(placement, is_reporter=True), list[dict[str, Any]]()
        worker: Any = own._worker
        worker.grid = grid
        worker.session = SimpleNamespace(config=SimpleNamespace(profile=None))
        worker.log_event = lambda event, said=written, **fields: said.append({"event": event, **fields})
        own.take({"stages": {str(stage): [0.1, 0.2] for stage in range(STAGES)}, "handover": 0.0})
        own._write()
        [event] = written
        told = {name: event[name] for name in ("copies", "alike") if name in event}
        assert event["event"] == "profile" and event["pipelines"] == pipelines and told == expected
