"""What the simulator says of a job by its profile: from the first step's end to the last one's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sweep.sim_validation import predicted

THERE = [MachineEvent(0, Change.ADD, name) for name in ("a", "b")]


def profile_in(folder: Path, costs: Mapping[str, float]) -> Path:
    """Two stages of 0.1 and 0.2 s, four micro-batches: 1.5 s a step on two workers, 2.4 s on one."""
    passes = {"forward": [0.1] * 2, "backward": [0.2] * 2, "handover": 0.0}
    grid = {"pipelines": 1, "micro_batches": 4, "samples_per_step": 8, "fixed_seconds": 0.0, "costs": dict(costs)}
    path = folder / "profile.json"
    path.write_text(json.dumps({**passes, **grid}), encoding="utf-8")
    return path


def test_a_machine_is_billed_from_its_coming_to_its_going(tmp_path: Path) -> None:
    """Two stages have no use for a third one, which has not even registered when it goes."""
    profile = profile_in(tmp_path, {})
    third = [MachineEvent(2000, Change.ADD, "c"), MachineEvent(7000, Change.REMOVE, "c")]
    alone, three = (
        predicted(machines, profile, join_seconds=100.0, steps=10, capacity=4, dollars_per_hour=3600.0)
        for machines in (THERE, [*THERE, *third])
    )
    assert alone.seconds == three.seconds == pytest.approx(15.0, abs=0.05)
    assert alone.dollars == pytest.approx(2 * 15.0, abs=0.1)
    assert three.dollars == pytest.approx(2 * 15.0 + 5.0, abs=0.1)


def test_a_join_takes_what_joins_take_longer_besides_a_move(tmp_path: Path) -> None:
    # Who stays has the other's shadow, and receives nothing.
    costs = {"handover_seconds": 0.5, "join_handover_seconds": 0.25, "transfer_seconds": 0.125}
    profile = profile_in(tmp_path, {**costs, "join_transfer_seconds": 1.0, "coordinate_copy_seconds": 0.0})
    record: list[tuple[str, float]] = []
    changes = [MachineEvent(2000, Change.NOTICE, "b"), MachineEvent(8000, Change.ADD, "c")]
    predicted([*THERE, *changes], profile, join_seconds=0.0, steps=10, capacity=4, record=record)
    found = {what: seconds for what, seconds in record if what != "transfer"}
    assert found == pytest.approx({"move": 0.5, "join": 1.875})
