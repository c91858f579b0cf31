"""What several tests of the simulator share: trace files if there are any, small scenarios, recorded machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.sim.jobs import Job, build_job
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.scenario import load_preset, validated
from deepspeed_bamboo.sim.traces import Trace

REPOSITORY = Path(__file__).parents[2]


def published_trace(name: str) -> Path:
    """A published trace file, which isn't part of the repository; skips where it is absent."""
    folder = Path(os.environ.get("BAMBOO_TRACES", REPOSITORY.parent / "shared" / "traces"))
    if not (folder / name).is_file():
        pytest.skip(f"needs the published trace {name} in ../shared/traces or in the folder that BAMBOO_TRACES names")
    return folder / name


def preset_job(name: str, *, trace: Trace | None = None, **over: Any) -> Job:
    """A preset made ready to run; `market__capacity=8` sets market.capacity, and so on."""
    data = load_preset(name).model_dump(exclude_none=True)
    for path, value in over.items():
        *sections, key = path.split("__")
        target = data
        for section in sections:
            target = target[section]
        target[key] = value
    return build_job(validated(data, where="test"), trace=trace)


def machines(*changes: tuple[float, str, str] | tuple[float, str, str, str]) -> list[MachineEvent]:
    """Machine events written as (seconds, add|notice|remove, node[, zone])."""
    kinds = {"add": Change.ADD, "notice": Change.NOTICE, "remove": Change.REMOVE}
    return [
        MachineEvent(round(change[0] * 1000), kinds[change[1]], change[2], change[3] if len(change) > 3 else "")
        for change in changes
    ]


def recorded(events: list[MachineEvent], *, hours: float) -> Trace:
    """A trace of these events that lasts so long."""
    return Trace(tuple(events), round(hours * 3_600_000))
