"""All workers are killed while their agents live: the job starts anew from the store, and ends with the same bits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.eventlog.files import read_worker_files
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine, Outcome
from tests.runtime.anew_script import worker
from tests.runtime.scenarios import Training
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import CLIPPED, kill

ONE_BY_FOUR = Training("anew-1x4", 4, steps=8, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, faults=[])
EVERYWHERE = ("idle", "forward", "backward", "reduce", "commit", "step")


def trained(
    server: ForkServer, folder: Path, training: Training, *, world: int, **machine: Any
) -> tuple[Outcome, list[dict[str, Any]], list[dict[str, Any]]]:
    """How it ended, what its workers have seen, and the events of all."""
    folder.mkdir()
    bamboo = {
        "checkpoint": {"dir": str(folder / "kept"), "interval_minutes": 1e-9},
        "event_log": str(folder / "events"),
    }
    argv = [json.dumps(asdict(replace(training, bamboo={**bamboo, **training.bamboo}))), str(folder)]
    with Machine(server, worker, workers=world, argv=argv, lease_seconds=10.0, **machine) as running:
        outcome = running.wait(within_seconds=90)
    seen = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return outcome, seen, [event for events in read_worker_files(folder / "events").values() for event in events]


def check(found: tuple[Outcome, list[dict[str, Any]], list[dict[str, Any]]], whole: dict[str, Any]) -> None:
    """All ended well, in the same state, and each loss that anybody has seen is the undisturbed job's."""
    outcome, seen, events = found
    assert set(outcome.exit_codes.values()) == {0}, outcome.output
    assert {one["digest"] for one in seen} == {whole["digest"]}, outcome.output
    steps = [event for event in events if event["event"] == "step"]
    assert steps and all(event["loss"] == whole["losses"][str(event["step"])] for event in steps), outcome.output
    assert all(loss == whole["losses"][step] for one in seen for step, loss in one["losses"].items())


@pytest.fixture(scope="module")
def whole(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    outcome, seen, _ = trained(fork_server, tmp_path_factory.mktemp("whole") / "job", ONE_BY_FOUR, world=4)
    assert set(outcome.exit_codes.values()) == {0} and len(seen) == 4, outcome.output
    return seen[0]


@pytest.mark.parametrize(
    "at", ["forward", *(pytest.param(at, marks=pytest.mark.sweep) for at in EVERYWHERE if at != "forward")]
)
def test_all_workers_are_killed_while_their_agents_live(
    fork_server: ForkServer, whole: dict[str, Any], tmp_path: Path, at: str
) -> None:
    faults = [kill(5, 0, stage, at, 1 if at in ("forward", "backward") else None) for stage in range(4)]
    killed = replace(ONE_BY_FOUR, faults=faults)
    found = trained(fork_server, tmp_path / "job", killed, world=4, max_restarts=2)
    check(found, whole)
    events = found[2]
    restored = [event for event in events if event["event"] == "restored" and not event["workers"]]
    assert {(e["step"], e["redone"]) for e in restored} <= {(n, n - e["from_step"]) for n in (5, 6) for e in restored}
    assert restored and all(0 < e["from_step"] <= e["step"] and e["source"] == "store" for e in restored), restored
